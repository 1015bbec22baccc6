"""What the copy of the lengths to the host costs a decode loop (SGLang's PR 26824), read from a profile.

    python -m lab.experiments.length_copy --out length_copy.json
    python -m lab.experiments.length_copy --gpu-us 500 1000 2000 --host-us 0 200 --out length_copy.json

A loop of target-verify steps stands for SGLang's. Each step spins for the scheduler's time on the host, builds the step's
metadata on the device without reading it, replays a CUDA graph of matrix products that lasts as long as asked, and adds the
accepted tokens to the lengths on the device. One arm then copies the lengths to the host and waits for them, as SGLang does
before the next step if a backend needs them there; the other goes on. Nothing else differs: the lengths that were copied are
not used. The arms take turns, each run is profiled, and its first steps are left out.

What the table says, per step, as medians over steps:

    synchronisations  CUDA calls that wait for the GPU, and blocking copies
    blocked           host time inside them
    other calls       host time inside all other CUDA calls; long ones mean that the driver's queue was full
    gap               GPU: from the end of the step before to this step's start, 0 if they overlap
    idle              GPU: time in which nothing ran, from the end of the step before to the end of this one
    step              GPU: from the end of the step before to the end of this one

CUPTI and the annotations make the host slower, by a microsecond or so a launch. So the same loop is also timed without a
profile, by the host's clock over all steps of a run.

The masks of target verify belong to the same change: the size of each form and the GPU time of filling it are measured too.
Exit status: 2 without a GPU.
"""

import argparse
import enum
import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from lab.metadata.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.forward_mode import ForwardMode
from lab.metadata.host_mirrors import LengthMirror
from lab.metadata.kv_pool import KVPool
from lab.metadata.mha import build_mha_metadata
from lab.metadata.verify_mask import VerifyMask, VerifyMaskForm, fill_verify_mask, preallocate_verify_mask
from lab.provenance import environment
from lab.timing.cupti import Activity, busy_us
from lab.timing.gpu_time import measure
from lab.timing.method import L2, Clock, Method
from lab.timing.work import GpuWork

if TYPE_CHECKING:
    from rich.table import Table

METHOD = (
    "torch.profiler (CUPTI), CPU and CUDA activities; GPU work belongs to the step whose launch has its correlation id; "
    "medians over the steps of all runs, the arms' runs in turns"
)
# Categories of a Chrome trace that torch.profiler exports.
GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
CALL_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})
HOST_CATEGORIES = frozenset({"user_annotation"})
STEP_NAME = re.compile(r"step (\d+)")
# CUDA calls that return when the GPU has got somewhere, by their names without a version suffix.
WAITING_CALLS = frozenset(
    {
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cudaDeviceSynchronize",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuCtxSynchronize",
    }
)
TIMELINE_STEPS = 3
MATRIX_SIZE = 2048  # a product of about 30 µs on an H200: small beside a step, long beside a launch
GRAPH_CLOCK = Method(Clock.GRAPH, L2.WARM)
# The worked case of the verify mask.
MASK_SIZES: Mapping[str, Any] = {"max_batch_size": 256, "num_draft_tokens": 4, "max_context_len": 131072}
WIDTH_WITHOUT_TERMINAL = 160


class IncompleteProfileError(RuntimeError):
    """A profile lacks what the figures are made of; the message says what."""


@dataclass(frozen=True)
class TraceEvent:
    """A stretch of a profile, times in nanoseconds of the trace's clock.

    Attributes:
        lane: process and thread of the host, or device and stream of the GPU.
        correlation: the id that a CUDA call shares with the GPU work that it launched; None elsewhere.
    """

    name: str
    start_ns: int
    end_ns: int
    lane: tuple[Any, Any]
    correlation: int | None = None

    @property
    def duration_us(self) -> float:
        return (self.end_ns - self.start_ns) / 1000

    def holds(self, other: "TraceEvent") -> bool:
        """Whether the other one starts within this one, on the same lane."""
        return self.lane == other.lane and self.start_ns <= other.start_ns < self.end_ns


@dataclass(frozen=True)
class ProfiledStep:
    """One step of the loop.

    Attributes:
        number: from "step N".
        host: its range on the host.
        phases: annotated parts of that range.
        calls: CUDA calls made in that range.
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

    def waits(self) -> list[TraceEvent]:
        """The CUDA calls that wait for the GPU."""
        to_pageable = {each.correlation for each in self.gpu if "Device -> Pageable" in each.name}
        return [call for call in self.calls if is_waiting_call(call.name) or call.correlation in to_pageable]


@dataclass(frozen=True)
class LoopProfile:
    """Steps in order, numbered without a gap, and all GPU work of the profile in the order of its starts."""

    steps: tuple[ProfiledStep, ...]
    gpu: tuple[TraceEvent, ...]


@dataclass(frozen=True)
class StepFacts:
    """What a step cost; see the module for the words. Times in µs."""

    step: int
    synchronisations: int
    blocked_us: float
    other_calls_us: float
    gap_us: float
    idle_us: float
    step_us: float
    gpu_activities: int


def is_waiting_call(name: str) -> bool:
    """Whether a CUDA call of this name waits for the GPU: a synchronisation, or a copy that is not asynchronous.

    An asynchronous copy into pageable memory waits too, which its name does not tell: `ProfiledStep.waits` looks at the copy.
    """
    plain = name.split("_")[0]  # cudaMemcpyAsync_ptsz, cuStreamSynchronize_v2
    return plain in WAITING_CALLS or (plain.startswith(("cudaMemcpy", "cuMemcpy")) and "Async" not in plain)


def read_profile(trace: Mapping[str, Any]) -> LoopProfile:
    """The steps of a loop in a Chrome trace of torch.profiler, a dict with the list "traceEvents".

    Raises:
        IncompleteProfileError: no GPU work, no "step N", a number that is missing or there twice, or a step that launched
            nothing.
    """
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
    """The facts of each step from number `first` on. Gaps, idle and step time begin where the step before ended.

    Raises:
        IncompleteProfileError: no such step, or `first` has none before it, or the steps differ in their number of GPU
            activities: all do the same, so the profile lost some.
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


def summary(facts: Sequence[StepFacts]) -> dict[str, float]:
    """The median of each fact, and `idle_percent`: the GPU's idle time over all steps."""
    names = [each.name for each in fields(StepFacts) if each.name != "step"]
    medians: dict[str, float] = {name: statistics.median(getattr(each, name) for each in facts) for name in names}
    idle_percent = 100 * sum(each.idle_us for each in facts) / sum(each.step_us for each in facts)
    return {name: round(value, 3) for name, value in (medians | {"idle_percent": idle_percent}).items()}


def timeline(loop: LoopProfile, first: int, count: int = TIMELINE_STEPS) -> list[tuple[str, str, float, float]]:
    """Consecutive steps for a picture: (lane, name, start_us, duration_us), from the host's start of the first.

    Lanes are "host", "CUDA calls" and "GPU stream N". What belongs to these steps is there, not what falls into their time:
    a host that runs ahead has begun later steps before the GPU ends these.
    """
    steps = [step for step in loop.steps if first <= step.number < first + count]
    zero_ns = steps[0].host.start_ns
    lanes = [
        *(("host", event) for step in steps for event in (step.host, *step.phases)),
        *(("CUDA calls", event) for step in steps for event in step.calls),
        *((f"GPU stream {event.lane[1]}", event) for step in steps for event in step.gpu),
    ]
    return [(lane, event.name, (event.start_ns - zero_ns) / 1000, event.duration_us) for lane, event in lanes]


def _events(trace: Mapping[str, Any], categories: frozenset[str]) -> list[TraceEvent]:
    """In the order of their starts."""
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
    # Whatever ran keeps the GPU from being idle, whosever it was.
    clipped = (Activity(each.name, max(each.start_ns, start_ns), min(each.end_ns, end_ns)) for each in gpu)
    step_us = (end_ns - start_ns) / 1000
    waits = step.waits()
    blocked_us = sum(wait.duration_us for wait in waits)
    return StepFacts(
        step=step.number,
        synchronisations=len(waits),
        blocked_us=round(blocked_us, 3),
        other_calls_us=round(sum(call.duration_us for call in step.calls) - blocked_us, 3),
        gap_us=max(0, step.gpu_start_ns - start_ns) / 1000,
        idle_us=round(step_us - busy_us(each for each in clipped if each.start_ns < each.end_ns), 3),
        step_us=step_us,
        gpu_activities=len(step.gpu),
    )


class Arm(enum.Enum):
    """What one step of the loop ends with."""

    WITH_COPY = "with the copy"
    WITHOUT_COPY = "without the copy"

    def __repr__(self) -> str:
        return f"Arm.{self.name}"


@dataclass(frozen=True)
class LoopSettings:
    """A decode loop, and how often it is run.

    Attributes:
        gpu_us: GPU time of the stand-in for the model's forward pass, one step; met to within one matrix product.
        host_us: host time of the stand-in for the scheduler, one step.
        batch_size, num_draft_tokens, seq_len, page_size: requests, query rows of each, their tokens at the start, tokens
            per page.
        warm_up_steps, steps: of one run; the first are not counted. So few that the driver's queue of about a thousand
            launches holds them: an arm without a copy runs ahead of the GPU.
        repeats: runs of each arm.

    Raises:
        ValueError: a size is too small.
    """

    gpu_us: float
    host_us: float
    batch_size: int = 64
    num_draft_tokens: int = 4
    seq_len: int = 4096
    page_size: int = 64
    warm_up_steps: int = 5
    steps: int = 15
    repeats: int = 5

    def __post_init__(self) -> None:
        least: Mapping[str, float] = {each.name: 1 for each in fields(self)} | {"host_us": 0, "steps": TIMELINE_STEPS}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {bound}")

    @property
    def steps_per_run(self) -> int:
        return self.warm_up_steps + self.steps


class DecodeLoop:
    """A loop of target-verify steps, ready to be run many times from the same lengths.

    Args:
        settings: the loop.
        forward: launches what stands for the model's forward pass.
        device: where lengths, request table and metadata are.
    """

    def __init__(self, settings: LoopSettings, forward: Callable[[], object], device: torch.device) -> None:
        bs, d = settings.batch_size, settings.num_draft_tokens
        longest = settings.seq_len + (settings.steps_per_run + 1) * d
        self.settings = settings
        self.forward = forward
        self.pool = KVPool(
            num_requests=bs,
            max_context_len=longest,
            page_size=settings.page_size,
            num_pages=1 + bs * -(-longest // settings.page_size),
            device=device,
        )
        # An engine gives requests their slots before it knows which drafts are accepted; here all at once.
        self.rows = torch.tensor([self.pool.add_request(longest) for _ in range(bs)], device=device)
        self.first_seq_lens = torch.full((bs,), settings.seq_len, device=device)
        generator = torch.Generator().manual_seed(0)
        self.accepted = torch.randint(1, d + 1, (bs,), generator=generator).to(device)
        self.draft_positions = torch.arange(d, device=device)
        self.mirror = LengthMirror(bs, device)

    def run(self, arm: Arm) -> None:
        """Launch all steps of one run, each in a range "step N". The GPU may still be at work afterwards."""
        seq_lens = self.first_seq_lens
        for number in range(self.settings.steps_per_run):
            with record_function(f"step {number}"):
                seq_lens = self._step(seq_lens, arm)

    def _step(self, seq_lens: Tensor, arm: Arm) -> Tensor:
        with record_function("schedule"):
            _spin(self.settings.host_us)
        with record_function("metadata"):
            build_mha_metadata(self._batch(seq_lens), self.pool)
        with record_function("forward"):
            self.forward()
            seq_lens = seq_lens + self.accepted
        if arm is Arm.WITH_COPY:
            with record_function("copy lengths"):
                self.mirror.read(seq_lens)
        return seq_lens

    def _batch(self, seq_lens: Tensor) -> ForwardBatch:
        d = self.settings.num_draft_tokens
        positions = seq_lens[:, None] + self.draft_positions
        slots = self.pool.req_to_token[self.rows[:, None], positions]
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            req_pool_indices=self.rows,
            seq_lens=seq_lens,
            out_cache_loc=slots.flatten().to(torch.int64),
            num_tokens=self.settings.batch_size * d,
            spec_info=SpecInfo(num_draft_tokens=d),
        )


class ForwardPass:
    """A graph of as many matrix products as take about `gpu_us`, in place of a model."""

    def __init__(self, gpu_us: float, device: torch.device) -> None:
        # Kept here, because a graph does not keep what it reads and writes.
        self.operands = [torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2)]
        self.out = torch.empty_like(self.operands[0])
        arguments = dict(zip(("input", "mat2"), self.operands, strict=True)) | {"out": self.out}
        product = GpuWork.of(torch.mm, 3 * self.out.nbytes, 2 * MATRIX_SIZE**3, **arguments)
        self.products = max(1, round(gpu_us / measure(product, GRAPH_CLOCK).median_us))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(self.products):
                torch.mm(*self.operands, out=self.out)


def _spin(duration_us: float) -> None:
    end_ns = time.perf_counter_ns() + 1000 * duration_us
    while time.perf_counter_ns() < end_ns:
        pass


def measure_arms(settings: LoopSettings) -> list[dict[str, Any]]:
    """Both arms of a loop on this GPU, their runs in turns, JSON-ready.

    Raises:
        IncompleteProfileError: a profile lacks what the figures are made of.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    forward = ForwardPass(settings.gpu_us, device)
    loop = DecodeLoop(settings, forward.graph.replay, device)
    first = settings.warm_up_steps
    unprofiled_us: dict[Arm, list[float]] = {arm: [] for arm in Arm}
    profiles: dict[Arm, list[LoopProfile]] = {arm: [] for arm in Arm}
    for arm in Arm:
        loop.run(arm)
    for _ in range(settings.repeats):
        for arm in Arm:
            unprofiled_us[arm].append(_unprofiled_step_us(loop, arm))
            profiles[arm].append(_profiled(loop, arm))
    return [
        {
            "arm": arm.value,
            **asdict(settings),
            "matrix_products": forward.products,
            **_recorded([step_facts(each, first) for each in profiles[arm]]),
            "unprofiled_step_us": [round(value, 3) for value in unprofiled_us[arm]],
            "timeline": timeline(profiles[arm][-1], first + settings.steps // 2 - TIMELINE_STEPS // 2),
        }
        for arm in Arm
    ]


def _recorded(runs: Sequence[Sequence[StepFacts]]) -> dict[str, Any]:
    return {
        "medians": summary([each for run in runs for each in run]),
        "runs": [[asdict(each) for each in run] for run in runs],
    }


def exported_trace(recorded: profile) -> dict[str, Any]:
    """The Chrome trace of a profile that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return trace


def _profiled(loop: DecodeLoop, arm: Arm) -> LoopProfile:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        loop.run(arm)
        torch.cuda.synchronize()
    return read_profile(exported_trace(recorded))


def _unprofiled_step_us(loop: DecodeLoop, arm: Arm) -> float:
    """Time of a step by the host's clock, from an idle GPU to an idle GPU, the warm-up steps among them."""
    torch.cuda.synchronize()
    start_ns = time.perf_counter_ns()
    loop.run(arm)
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - start_ns) / 1000 / loop.settings.steps_per_run


def measure_masks(device: torch.device) -> list[dict[str, Any]]:
    """The size of each form of the verify mask, and the GPU time of filling it for the largest batch, JSON-ready."""
    return [_measured_mask(form, device) for form in VerifyMaskForm]


def _measured_mask(form: VerifyMaskForm, device: torch.device) -> dict[str, Any]:
    mask = preallocate_verify_mask(form, **MASK_SIZES, device=device)
    assert mask is not None
    fill = GpuWork.of(fill_verify_mask, mask.nbytes, mask=mask, batch_size=mask.max_batch_size)
    filled = measure(replace(fill, check=_check_filled), GRAPH_CLOCK)
    return {
        "form": form.value,
        **MASK_SIZES,
        "mask_bytes": mask.nbytes,
        "fill_us": round(filled.median_us, 3),
        "fill_iqr_us": round(filled.iqr_us, 3),
        "method": str(filled.method),
        "device": filled.device.facts(),
    }


def _check_filled(arguments: Mapping[str, Any]) -> None:
    mask: VerifyMask = arguments["mask"]
    assert bool(mask.buffer.all()), "the mask was not filled"
    mask.buffer.zero_()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.length_copy", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--gpu-us", type=float, nargs="+", default=[500.0, 2000.0], help="GPU time of a step")
    parser.add_argument("--host-us", type=float, nargs="+", default=[200.0], help="the scheduler's time of a step")
    for name in ("batch_size", "seq_len", "warm_up_steps", "steps", "repeats"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(LoopSettings, name))
    parser.add_argument("--out", type=Path, help="also write a JSON file")
    given = vars(parser.parse_args(argv))
    out, gpu_times, host_times = given.pop("out"), given.pop("gpu_us"), given.pop("host_us")
    try:
        loops = [LoopSettings(gpu_us, host_us, **given) for gpu_us in gpu_times for host_us in host_times]
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        print("not measured: this experiment profiles a CUDA GPU, and there is none here", file=sys.stderr)
        return 2
    arms = [row for settings in loops for row in measure_arms(settings)]
    masks = measure_masks(torch.device("cuda"))
    if out is not None:
        recorded = {"environment": environment(), "method": METHOD, "arms": arms, "verify_masks": masks}
        out.write_text(json.dumps(recorded, indent=1) + "\n")
    _print(arms, masks)
    return 0


# Column header, what it shows of an arm.
ARM_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "GPU work, µs": lambda row: f"{row['gpu_us']:,.0f}",
    "host work, µs": lambda row: f"{row['host_us']:,.0f}",
    "arm": lambda row: str(row["arm"]),
    "synchronisations": lambda row: f"{row['medians']['synchronisations']:g}",
    "blocked, µs": lambda row: f"{row['medians']['blocked_us']:,.1f}",
    "other calls, µs": lambda row: f"{row['medians']['other_calls_us']:,.1f}",
    "gap, µs": lambda row: f"{row['medians']['gap_us']:,.1f}",
    "idle, µs": lambda row: f"{row['medians']['idle_us']:,.1f}",
    "idle, %": lambda row: f"{row['medians']['idle_percent']:.1f}",
    "step, µs": lambda row: f"{row['medians']['step_us']:,.1f}",
    "step unprofiled, µs": lambda row: f"{statistics.median(row['unprofiled_step_us']):,.1f}",
}
MASK_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "verify mask": lambda row: str(row["form"]),
    "bytes": lambda row: f"{row['mask_bytes']:,}",
    "fill, µs": lambda row: f"{row['fill_us']:,.2f}",
}


def _print(arms: Sequence[Mapping[str, Any]], masks: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)
    console.print(_table("A decode loop, per step", ARM_COLUMNS, arms))
    sizes = ", ".join(f"{name} {size:,}" for name, size in MASK_SIZES.items())
    console.print(_table(f"The mask of target verify ({sizes})", MASK_COLUMNS, masks))


def _table(
    title: str, columns: Mapping[str, Callable[[Mapping[str, Any]], str]], rows: Iterable[Mapping[str, Any]]
) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for header in columns:
        table.add_column(header, justify="left" if header in ("arm", "verify mask") else "right")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


if __name__ == "__main__":
    sys.exit(main())
