"""Kernel times from CUPTI's activity records. Each timed run has an external correlation id, so that work between two runs,
such as reading other data to fill L2, does not count, and a run that launched nothing is an error.
"""

import importlib
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lab.timing.sampling import RefusedTimeError, Step

BUFFER_BYTES = 8 * 2**20
OLDEST_MAJOR = 13
OUTSIDE = 2**40  # external correlation id of work before and after runs; the ids of runs count from 1


@dataclass(frozen=True)
class Activity:
    """One kernel (`name`), copy ("MEMCPY") or fill ("MEMSET") on the GPU, in nanoseconds of CUPTI's clock."""

    name: str
    start_ns: int
    end_ns: int


def span_us(activities: Iterable[Activity]) -> float:
    """Return the time from the first start to the last end in microseconds, gaps included; 0 without activities."""
    ends_ns = [end for each in activities for end in (each.start_ns, each.end_ns)]
    return (max(ends_ns, default=0) - min(ends_ns, default=0)) / 1000


def busy_us(activities: Iterable[Activity]) -> float:
    """Return the time in µs during which at least one of the activities ran."""
    total_ns, end_ns = 0, 0
    for each in sorted(activities, key=lambda activity: activity.start_ns):
        total_ns += max(0, each.end_ns - max(each.start_ns, end_ns))
        end_ns = max(end_ns, each.end_ns)
    return total_ns / 1000


def record(steps: Iterable[Step]) -> list[list[Activity]]:
    """Execute each step (before, run): call `before` unless it is None, wait for the GPU, and call `run`, which is recorded.
    Return the kernels, copies and fills of each `run`, sorted by start. Raises RuntimeError without cupti-python 13, under
    another profiler, or if a `run` uses no GPU, and RefusedTimeError if the GPU did work that no step launched.
    """
    cupti = _cupti()
    kinds = cupti.ActivityKind
    devices = (kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET)
    enabled = (kinds.RUNTIME, kinds.DRIVER, kinds.EXTERNAL_CORRELATION, *devices)
    activities: list[tuple[int, Activity]] = []  # (correlation id, activity)
    run_of: dict[int, int] = {}  # number of the run, by correlation id

    def completed(records: list[Any]) -> None:
        for each in records:
            if each.kind in devices:
                name = each.name if each.kind == kinds.CONCURRENT_KERNEL else kinds(each.kind).name
                activities.append((each.correlation_id, Activity(name, each.start, each.end)))
            elif each.kind == kinds.EXTERNAL_CORRELATION:
                run_of[each.correlation_id] = each.external_id - 1

    try:
        try:
            cupti.activity_register_callbacks(lambda: (BUFFER_BYTES, 0), completed)
            for kind in enabled:
                cupti.activity_enable(kind)
        except cupti.cuptiError as error:
            raise RuntimeError(
                f"CUPTI cannot record ({error}): no other profiler may run, and ncu counts as one; or choose another clock"
            ) from error
        count = _run_all(cupti, steps)
        cupti.activity_flush_all(0)
    finally:
        cupti.finalize()  # this also disables every kind
    runs: list[list[Activity]] = [[] for _ in range(count)]
    for correlation, activity in sorted(activities, key=lambda each: each[1].start_ns):
        run = run_of.get(correlation)
        if run is None:
            raise RefusedTimeError(
                f"CUPTI saw {activity.name!r} on the GPU, which no timed call launched: the times are refused"
            )
        if run < count:
            runs[run].append(activity)
    for number, mine in enumerate(runs):
        if not mine:
            raise RuntimeError(f"CUPTI saw nothing run on the GPU in run {number} of {count}: nothing was timed")
    return runs


def _run_all(cupti: Any, steps: Iterable[Step]) -> int:
    count, custom, remaining = 0, cupti.ExternalCorrelationKind.CUSTOM0, iter(steps)
    while True:
        cupti.activity_push_external_correlation_id(custom, OUTSIDE)
        step = next(remaining, None)
        if step is not None and step[0] is not None:
            step[0]()
        torch.cuda.synchronize()
        cupti.activity_pop_external_correlation_id(custom)
        if step is None:
            return count
        count += 1
        cupti.activity_push_external_correlation_id(custom, count)  # 0 is no id
        step[1]()
        cupti.activity_pop_external_correlation_id(custom)
        torch.cuda.synchronize()


def _cupti() -> Any:
    try:
        version = importlib.metadata.version("cupti-python")
        if int(version.split(".")[0]) >= OLDEST_MAJOR:
            return importlib.import_module("cupti.cupti")
        reason = f"this is {version}"
    except ImportError as error:
        reason = str(error)
    raise RuntimeError(
        f"the CUPTI clock needs cupti-python {OLDEST_MAJOR} or later (pip install '.[cupti]') and CUDA 13, and {reason}; "
        "or choose the graph clock, which needs neither"
    )
