"""Read, from a profile of torch.profiler, the work of each step of a loop on the host and on the GPU.

GPU work belongs to the step that launched it, by its correlation id, and not to the step during which it ran. An incomplete
profile is refused.
"""

import itertools
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lab.timing.cupti import Activity, busy_us

# Categories of a Chrome trace that torch.profiler exports.
GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
CALL_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})
HOST_CATEGORIES = frozenset({"user_annotation"})
STEP_NAME = re.compile(r"step (\d+)")
# CUDA calls that return when the GPU has got somewhere, by their names without a version suffix.
WAITING_CALLS = re.compile("cuda(Stream|Event|Device)Synchronize|cu(Stream|Event|Ctx)Synchronize")
TIMELINE_STEPS = 3


class IncompleteProfileError(RuntimeError):
    """A profile lacks events. The message says which."""


@dataclass(frozen=True)
class TraceEvent(Activity):
    """An event of a profile, in nanoseconds of the trace's clock.

    Attributes:
        lane: process and thread of the host, or device and stream of the GPU.
        correlation: the id that a CUDA call shares with the GPU work that it launched; None elsewhere.
    """

    lane: tuple[Any, Any]
    correlation: int | None = None

    @property
    def duration_us(self) -> float:
        return (self.end_ns - self.start_ns) / 1000

    def holds(self, other: "TraceEvent") -> bool:
        """Return True if the other event is on the same lane and starts within this event."""
        return self.lane == other.lane and self.start_ns <= other.start_ns < self.end_ns


@dataclass(frozen=True)
class ProfiledStep:
    """One step of a loop.

    Attributes:
        host: its range "step N" on the host; `phases` are annotated parts of it, `calls` the CUDA calls in it.
        gpu: the kernels, copies and fills that these calls launched, in the order of their starts; never empty.
    """

    number: int
    host: TraceEvent
    phases: tuple[TraceEvent, ...]
    calls: tuple[TraceEvent, ...]
    gpu: tuple[TraceEvent, ...]

    @property
    def gpu_start_ns(self) -> int:
        return self.gpu[0].start_ns

    @property
    def gpu_end_ns(self) -> int:
        return max(each.end_ns for each in self.gpu)

    def launched_in(self, name: str) -> tuple[TraceEvent, ...]:
        """Return the GPU work that a phase launched. Raises IncompleteProfileError if there is none."""
        ranges = [each for each in self.phases if each.name == name]
        launched = {call.correlation for call in self.calls if any(each.holds(call) for each in ranges)} - {None}
        found = tuple(each for each in self.gpu if each.correlation in launched)
        if ranges and not found:
            raise IncompleteProfileError(f"{name} of step {self.number} launched nothing: the profile lost it")
        return found

    def waits(self) -> list[TraceEvent]:
        to_pageable = {each.correlation for each in self.gpu if "Device -> Pageable" in each.name}
        return [call for call in self.calls if is_waiting_call(call.name) or call.correlation in to_pageable]


@dataclass(frozen=True)
class LoopProfile:
    """The steps of a loop, numbered without a gap, and all GPU work of the profile in the order of its starts."""

    steps: tuple[ProfiledStep, ...]
    gpu: tuple[TraceEvent, ...]


@dataclass(frozen=True)
class StepFacts:
    """The times of a step in µs, and its numbers of kernels, copies and fills. `studies.length_copy` explains the names."""

    step: int
    synchronisations: int
    blocked_us: float
    other_calls_us: float
    gap_us: float
    idle_us: float
    step_us: float
    gpu_activities: int


def is_waiting_call(name: str) -> bool:
    """Return True if a CUDA call of this name waits for the GPU. Copies to pageable memory wait too (`ProfiledStep.waits`)."""
    plain = name.split("_")[0]  # cudaMemcpyAsync_ptsz, cuStreamSynchronize_v2
    return bool(WAITING_CALLS.fullmatch(plain)) or (
        plain.startswith(("cudaMemcpy", "cuMemcpy")) and "Async" not in plain
    )


def read_profile(trace: Mapping[str, Any]) -> LoopProfile:
    """Read the steps of a loop from a Chrome trace. Raises IncompleteProfileError if a step or its GPU work is missing."""
    gpu = _events(trace, GPU_CATEGORIES)
    if not gpu:
        raise IncompleteProfileError("the profile has no GPU activity: was it recorded with ProfilerActivity.CUDA?")
    host, calls = _events(trace, HOST_CATEGORIES), _events(trace, CALL_CATEGORIES)
    ranges = [each for each in host if STEP_NAME.fullmatch(each.name)]
    if not ranges:
        raise IncompleteProfileError('the profile has no range called "step N": mark steps with record_function')
    steps = sorted((_step(each, host, calls, gpu) for each in ranges), key=lambda step: step.number)
    numbers = [step.number for step in steps]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise IncompleteProfileError(f"the profile has steps {numbers}, expected each number once and none left out")
    return LoopProfile(tuple(steps), tuple(gpu))


def step_facts(loop: LoopProfile, first: int) -> list[StepFacts]:
    """Return the facts of each step from number `first` on. A step's gap, idle time and time begin at the end of the previous
    step.

    Raises:
        IncompleteProfileError: there is no such step or no earlier one, or steps have different numbers of GPU activities.
    """
    if not loop.steps[0].number < first <= loop.steps[-1].number:
        raise IncompleteProfileError(
            f"no facts from step {first} on: the profile has steps {loop.steps[0].number} to {loop.steps[-1].number}, "
            "and a step is measured from the end of the one before"
        )
    pairs = itertools.pairwise(loop.steps)
    facts = [_facts(before, step, loop.gpu) for before, step in pairs if step.number >= first]
    numbers = {each.gpu_activities for each in facts}
    if len(numbers) > 1:
        raise IncompleteProfileError(
            f"steps have {sorted(numbers)} GPU activities, but all do the same: some were lost"
        )
    return facts


def busy_within_us(activities: Iterable[TraceEvent], start_ns: int, end_ns: int) -> float:
    """Return the time from `start_ns` to `end_ns` in which at least one of the activities ran, in microseconds."""
    clipped = (Activity(each.name, max(each.start_ns, start_ns), min(each.end_ns, end_ns)) for each in activities)
    return busy_us(each for each in clipped if each.start_ns < each.end_ns)


def medians(facts: Sequence[Any]) -> dict[str, float]:
    names = [each.name for each in fields(facts[0]) if each.name != "step"]
    return {name: round(statistics.median(getattr(each, name) for each in facts), 3) for name in names}


def summary(facts: Sequence[StepFacts]) -> dict[str, float]:
    """Return the median of each fact over the steps, and `idle_percent`, the GPU's idle time in percent of all steps' time."""
    idle_percent = 100 * sum(each.idle_us for each in facts) / sum(each.step_us for each in facts)
    return medians(facts) | {"idle_percent": round(idle_percent, 3)}


def timeline(loop: LoopProfile, first: int) -> list[tuple[str, str, float, float]]:
    """Return the events that belong to consecutive steps: (lane, name, start_us, duration_us), from the first step's start."""
    steps = [step for step in loop.steps if first <= step.number < first + TIMELINE_STEPS]
    zero_ns = steps[0].host.start_ns
    lanes = [
        *(("host", event) for step in steps for event in (step.host, *step.phases)),
        *(("CUDA calls", event) for step in steps for event in step.calls),
        *((f"GPU stream {event.lane[1]}", event) for step in steps for event in step.gpu),
    ]
    return [(lane, event.name, (event.start_ns - zero_ns) / 1000, event.duration_us) for lane, event in lanes]


def _events(trace: Mapping[str, Any], categories: frozenset[str]) -> list[TraceEvent]:
    listed = [_event(each) for each in trace["traceEvents"] if each.get("ph") == "X" and each.get("cat") in categories]
    return sorted(listed, key=lambda event: event.start_ns)


def _event(entry: Mapping[str, Any]) -> TraceEvent:
    start_us, correlation = float(entry["ts"]), entry.get("args", {}).get("correlation")
    start_ns, end_ns = round(1000 * start_us), round(1000 * (start_us + float(entry["dur"])))
    return TraceEvent(entry["name"], start_ns, end_ns, (entry["pid"], entry["tid"]), correlation)


def _step(
    host: TraceEvent, annotations: Iterable[TraceEvent], calls: Iterable[TraceEvent], gpu: Iterable[TraceEvent]
) -> ProfiledStep:
    number = int(host.name.split()[1])
    own_calls = tuple(call for call in calls if host.holds(call))
    launched = {call.correlation for call in own_calls} - {None}
    own_gpu = tuple(each for each in gpu if each.correlation in launched)
    if not own_gpu:
        raise IncompleteProfileError(
            f"step {number} launched nothing on the GPU: the profile lost it, or it did nothing"
        )
    phases = tuple(each for each in annotations if each is not host and host.holds(each))
    return ProfiledStep(number, host, phases, own_calls, own_gpu)


def _facts(before: ProfiledStep, step: ProfiledStep, gpu: Iterable[TraceEvent]) -> StepFacts:
    start_ns, end_ns = before.gpu_end_ns, step.gpu_end_ns
    step_us = (end_ns - start_ns) / 1000
    waits = step.waits()
    blocked_us = sum(wait.duration_us for wait in waits)
    return StepFacts(
        step=step.number,
        synchronisations=len(waits),
        blocked_us=round(blocked_us, 3),
        other_calls_us=round(sum(call.duration_us for call in step.calls) - blocked_us, 3),
        gap_us=max(0, step.gpu_start_ns - start_ns) / 1000,
        # Whatever ran keeps the GPU from being idle, whosever it was.
        idle_us=round(step_us - busy_within_us(gpu, start_ns, end_ns), 3),
        step_us=step_us,
        gpu_activities=len(step.gpu),
    )


def exported_trace(recorded: profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return trace


def profiled(run: Callable[[], object]) -> LoopProfile:
    """Profile a run of a loop, which begins and ends with an idle GPU. Raises IncompleteProfileError as `read_profile` does."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    return read_profile(exported_trace(recorded))


def unprofiled_us(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start_ns = time.perf_counter_ns()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - start_ns) / 1000
