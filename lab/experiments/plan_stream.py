"""What planning verify beside the draft saves (SGLang's PR 25925), and what a tree's fix-up costs, read from a profile.

    python -m lab.experiments.plan_stream --out plan_stream.json
    python -m lab.experiments.plan_stream --draft-us 100 400 1600 --verify-us 2000 --batch-size 1 --out plan_stream.json

A loop of speculative iterations. Each names its batch on the device, replays a CUDA graph of matrix products that lasts as
long as asked in place of the draft steps, plans verify's metadata, fixes up what depends on the draft, replays another graph in
place of the target model, and adds the accepted tokens to the lengths. The arms are all combinations of:

    drafts   chains, which need no fix-up; or trees, whose packed mask is written after the draft from each token's parent
    builder  torch operations, many small launches as in SGLang 0.5.13; or one fused launch as in 0.5.23
    start    in line, behind the draft on its stream; on a second stream after the draft; on a second stream after the inputs

The arms' runs take turns, in an order reshuffled each round; each is profiled, and its first iterations are left out. What
verify was handed is checked before and after. What the table says, per iteration, as medians:

    plan         GPU: from the start of the plan's first kernel or copy to the end of its last
    busy         GPU: the part of that time in which one of them ran
    hidden       GPU: the part of the busy time that fell into the draft
    fix-up       GPU: from the start of its first kernel to the end of its last; none for chains
    between      GPU: from the end of the draft to the start of verify; what is left of plan and fix-up on the critical path
    iteration    GPU: from the end of the iteration before to the end of this one
    unprofiled   the same without a profile, by the host's clock over all iterations of a run
    host         what the host needs to launch an iteration, without a profile, the GPU's queue drained before each batch

CUPTI and the annotations make the host slower, by a microsecond or so a launch. The matrix products fill nearly all of the GPU,
so a plan beside them may take longer than alone. Writing the mask is also timed by itself, as a CUDA graph would replay it.
Exit status: 2 without a GPU.
"""

import argparse
import enum
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from lab.experiments.recording import NO_GPU, Columns, Recording, gpu_is_here, table_of
from lab.experiments.stand_in import MatrixProducts, VerifyRequests
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.plan_stream import FixUp, PlannedVerify, PlanStart, PlanStream, VerifyBuffers
from lab.metadata.mha.buffers import MetadataBuilder
from lab.metadata.mha.metadata import build_mha_metadata
from lab.metadata.speculation.verify_mask import pack_tree_mask
from lab.metadata.speculation.verify_plan import MHAChainVerify, TreeMaskVerify
from lab.timing.cupti import Activity, busy_us
from lab.timing.gpu_time import measure
from lab.timing.host_time import METHOD as HOST_METHOD
from lab.timing.host_time import host_time
from lab.timing.method import L2, Clock, Method
from lab.timing.step_profile import (
    IncompleteProfileError,
    LoopProfile,
    ProfiledStep,
    TraceEvent,
    profiled,
    step_facts,
    unprofiled_us,
)
from lab.timing.work import GpuWork

Result = TypeVar("Result")

METHOD = (
    "torch.profiler (CUPTI), CPU and CUDA activities; GPU work belongs to the iteration and phase whose launch has its "
    "correlation id; medians over the iterations of all runs, the arms' runs in turns"
)
GRAPH_CLOCK = Method(Clock.GRAPH, L2.WARM)
SHUFFLE_SEED = 0
# Few enough for the driver's queue of about a thousand launches, at up to sixty an iteration.
HOST_BATCHES, HOST_CALLS_PER_BATCH = 20, 8
# (requests, draft tokens of each) whose masks are written.
FIX_UP_POINTS = tuple(itertools.product((1, 8, 64, 256), (4, 8, 16, 64)))


class Drafts(enum.Enum):
    """What is drafted, and so whether a fix-up is needed."""

    CHAINS = "chains"
    TREES = "trees"

    def __repr__(self) -> str:
        return f"Drafts.{self.name}"


class Phase(enum.Enum):
    """Parts of an iteration, by the names of their ranges in a profile."""

    INPUTS = "inputs"
    DRAFT = "draft"
    PLAN = "plan"
    FIX_UP = "fix-up"
    VERIFY = "verify"

    def __repr__(self) -> str:
        return f"Phase.{self.name}"


@dataclass(frozen=True)
class Arm:
    drafts: Drafts
    builder: MetadataBuilder
    start: PlanStart

    def __str__(self) -> str:
        return f"{self.drafts.value}, {self.builder.value}, {self.start.value}"


ARMS = tuple(itertools.starmap(Arm, itertools.product(Drafts, MetadataBuilder, PlanStart)))


@dataclass(frozen=True)
class LoopSettings:
    """A loop of speculative iterations, and how often it is run.

    Attributes:
        draft_us, verify_us: GPU time of what stands for the draft steps and for the target model, one iteration; met to within
            one matrix product of about 30 µs on an H200.
        batch_size, num_draft_tokens, seq_len, page_size: requests, query rows of each, their tokens at the start, tokens
            per page.
        max_context_len: of the pool, which gives the page table its width.
        warm_up_steps, steps: iterations of one run; the first are not counted.
        repeats: runs of each arm.

    Raises:
        ValueError: a size is too small, or the requests outgrow `max_context_len`.
    """

    draft_us: float
    verify_us: float
    batch_size: int = 64
    num_draft_tokens: int = 4
    seq_len: int = 4096
    page_size: int = 64
    max_context_len: int = 131072
    warm_up_steps: int = 3
    steps: int = 12
    repeats: int = 5

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) < 1:
                raise ValueError(f"{each.name}={getattr(self, each.name)} must be at least 1")
        if self.longest > self.max_context_len:
            raise ValueError(
                f"max_context_len={self.max_context_len} must hold the {self.longest} tokens of the last step"
            )

    @property
    def steps_per_run(self) -> int:
        return self.warm_up_steps + self.steps

    @property
    def longest(self) -> int:
        return self.seq_len + (self.steps_per_run + 1) * self.num_draft_tokens


class MarkedPlanStream(PlanStream):
    """A plan stream whose parts are ranges in a profile."""

    def _plan(self, batch: ForwardBatch, inputs_final: torch.cuda.Event | None) -> PlannedVerify:
        with record_function(Phase.PLAN.value):
            return super()._plan(batch, inputs_final)

    def _fix_up(self, planned: PlannedVerify) -> None:
        with record_function(Phase.FIX_UP.value):
            super()._fix_up(planned)


class SpeculativeLoop:
    """Iterations of all arms over the same requests, ready to be run many times from the same lengths.

    Args:
        settings: the loop.
        draft, verify: launch what stands for the draft steps and for the target model.
        device: where lengths, request table and metadata are.
    """

    def __init__(
        self,
        settings: LoopSettings,
        draft: Callable[[], object],
        verify: Callable[[], object],
        device: torch.device,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.settings = settings
        self.draft = draft
        self.verify = verify
        self.requests = VerifyRequests(
            batch_size=settings.batch_size,
            num_draft_tokens=settings.num_draft_tokens,
            seq_len=settings.seq_len,
            longest=settings.longest,
            page_size=settings.page_size,
            max_context_len=settings.max_context_len,
            generator=generator,
            device=device,
        )
        # Other trees in each iteration.
        shape = (settings.steps_per_run, settings.batch_size, settings.num_draft_tokens)
        self.parents = random_trees(*shape, generator=generator).to(device)
        self.planners = {arm: self._planner(arm) for arm in ARMS}

    def run(self, arm: Arm, steps: int | None = None) -> None:
        """Launch a run's iterations, each in a range "step N". The GPU may still be at work afterwards."""
        seq_lens = self.requests.first_seq_lens
        for number in range(self.settings.steps_per_run if steps is None else steps):
            with record_function(f"step {number}"):
                _, seq_lens = self._iterate(arm, seq_lens, number, self._verify)

    def check(self, arm: Arm) -> None:
        """Run all iterations with a verify pass that copies what it is handed, then compare that with a fresh build.

        Raises:
            RuntimeError: verify was handed something else.
        """
        seq_lens = self.requests.first_seq_lens
        handed: list[tuple[Tensor, dict[str, Tensor]]] = []
        for number in range(self.settings.steps_per_run):
            before = seq_lens
            copies, seq_lens = self._iterate(arm, before, number, _copies)
            handed.append((before, copies))
        for number, (lens, copies) in enumerate(handed):
            for name, expected in self._expected(arm, lens, number).items():
                if not torch.equal(self._live(name, copies[name], lens), self._live(name, expected, lens)):
                    raise RuntimeError(
                        f"{arm}: in iteration {number} verify was handed another {name} than its batch has"
                    )

    def _iterate(
        self, arm: Arm, seq_lens: Tensor, number: int, verify: Callable[[PlannedVerify], Result]
    ) -> tuple[Result, Tensor]:
        """One iteration; returns what `verify` returned, and the lengths of the next."""
        with record_function(Phase.INPUTS.value):
            batch = self.requests.batch(seq_lens)

        def draft(buffers: VerifyBuffers) -> None:
            with record_function(Phase.DRAFT.value):
                self.draft()
                if buffers[0] is not None:
                    buffers[0].copy_(self.parents[number])

        return self.planners[arm].run(batch, draft, verify), seq_lens + self.requests.accepted

    def _verify(self, planned: PlannedVerify) -> None:
        with record_function(Phase.VERIFY.value):
            self.verify()

    def _planner(self, arm: Arm) -> MarkedPlanStream:
        backend = TreeMaskVerify if arm.drafts is Drafts.TREES else MHAChainVerify
        settings = self.settings
        return MarkedPlanStream(
            backend(self.requests.pool, settings.num_draft_tokens, [settings.batch_size], arm.builder), arm.start
        )

    def _expected(self, arm: Arm, seq_lens: Tensor, number: int) -> dict[str, Tensor]:
        batch = self.requests.batch(seq_lens)
        mask = pack_tree_mask(self.parents[number]) if arm.drafts is Drafts.TREES else None
        return PlannedVerify(batch, build_mha_metadata(batch, self.requests.pool), mask).tensors()

    def _live(self, name: str, tensor: Tensor, seq_lens: Tensor) -> Tensor:
        """A table without its dead cells, which the builders leave different."""
        if name != "page_table":
            return tensor
        pages = -(-(seq_lens + self.settings.num_draft_tokens) // self.settings.page_size)
        return tensor.masked_fill(torch.arange(tensor.shape[1], device=tensor.device) >= pages[:, None], 0)


def random_trees(*shape: int, generator: torch.Generator) -> Tensor:
    """Parents of trees, int64 of this shape, d last: each token follows one before it, or the last accepted one (-1)."""
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * (torch.arange(shape[-1]) + 1)).long() - 1


def _copies(planned: PlannedVerify) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in planned.tensors().items()}


@dataclass(frozen=True)
class IterationFacts:
    """What an iteration cost; see the module for the words. Times in µs, launches of the GPU's kernels, copies and fills."""

    step: int
    draft_us: float
    plan_us: float
    plan_busy_us: float
    plan_launches: int
    hidden_us: float
    fix_up_us: float
    fix_up_launches: int
    between_us: float
    verify_us: float
    iteration_us: float


def phase_gpu(step: ProfiledStep, phase: Phase) -> tuple[TraceEvent, ...]:
    """The GPU work that a phase of an iteration launched, in the order of its starts; none where there is no such phase.

    Raises:
        IncompleteProfileError: the phase is there and launched nothing.
    """
    ranges = [each for each in step.phases if each.name == phase.value]
    launched = {call.correlation for call in step.calls if any(each.holds(call) for each in ranges)} - {None}
    found = tuple(each for each in step.gpu if each.correlation in launched)
    if ranges and not found:
        raise IncompleteProfileError(f"{phase.value} of step {step.number} launched nothing: the profile lost it")
    return found


def iteration_facts(loop: LoopProfile, first: int) -> list[IterationFacts]:
    """The facts of each iteration from number `first` on, which must have one before it.

    Raises:
        IncompleteProfileError: as `lab.timing.step_profile.step_facts`, or a phase is missing.
    """
    iteration_us = {each.step: each.step_us for each in step_facts(loop, first)}
    return [_facts(step, iteration_us[step.number]) for step in loop.steps if step.number in iteration_us]


def _facts(step: ProfiledStep, iteration_us: float) -> IterationFacts:
    gpu = {phase: phase_gpu(step, phase) for phase in Phase}
    missing = [phase.value for phase, found in gpu.items() if not found and phase is not Phase.FIX_UP]
    if missing:
        raise IncompleteProfileError(f"step {step.number} has no {', '.join(missing)} on the GPU")
    draft = _bounds_ns(gpu[Phase.DRAFT])
    return IterationFacts(
        step=step.number,
        draft_us=_span_us(gpu[Phase.DRAFT]),
        plan_us=_span_us(gpu[Phase.PLAN]),
        plan_busy_us=_busy_within_us(gpu[Phase.PLAN], _bounds_ns(gpu[Phase.PLAN])),
        plan_launches=len(gpu[Phase.PLAN]),
        hidden_us=_busy_within_us(gpu[Phase.PLAN], draft),
        fix_up_us=_span_us(gpu[Phase.FIX_UP]),
        fix_up_launches=len(gpu[Phase.FIX_UP]),
        between_us=(gpu[Phase.VERIFY][0].start_ns - draft[1]) / 1000,
        verify_us=_span_us(gpu[Phase.VERIFY]),
        iteration_us=iteration_us,
    )


def _bounds_ns(activities: Sequence[TraceEvent]) -> tuple[int, int]:
    return min(each.start_ns for each in activities), max(each.end_ns for each in activities)


def _busy_within_us(activities: Iterable[TraceEvent], bounds_ns: tuple[int, int]) -> float:
    start_ns, end_ns = bounds_ns
    clipped = (Activity(each.name, max(each.start_ns, start_ns), min(each.end_ns, end_ns)) for each in activities)
    return busy_us(each for each in clipped if each.start_ns < each.end_ns)


def _span_us(activities: Sequence[TraceEvent]) -> float:
    """First start to last end; 0 for none."""
    if not activities:
        return 0.0
    start_ns, end_ns = _bounds_ns(activities)
    return (end_ns - start_ns) / 1000


def two_lanes(step: ProfiledStep) -> list[dict[str, Any]]:
    """One iteration's GPU work for a picture, in the order of its starts.

    Each entry has `stream` ("forward", where verify runs, or "plan"), `phase` (None for what adds the accepted tokens), `name`,
    and `start_us`, `duration_us` from the iteration's first kernel on.
    """
    phase_of = {id(each): phase.value for phase in Phase for each in phase_gpu(step, phase)}
    forward = phase_gpu(step, Phase.VERIFY)[0].lane
    return [
        {
            "stream": "forward" if each.lane == forward else "plan",
            "phase": phase_of.get(id(each)),
            "name": each.name,
            "start_us": round((each.start_ns - step.gpu_start_ns) / 1000, 3),
            "duration_us": round(each.duration_us, 3),
        }
        for each in step.gpu
    ]


def medians(facts: Iterable[IterationFacts]) -> dict[str, float]:
    """The median of each fact."""
    listed = list(facts)
    names = [each.name for each in fields(IterationFacts) if each.name != "step"]
    return {name: round(statistics.median(getattr(each, name) for each in listed), 3) for name in names}


def measure_arms(settings: LoopSettings) -> list[dict[str, Any]]:
    """All arms of a loop on this GPU, their runs in turns, JSON-ready.

    Raises:
        IncompleteProfileError: a profile lacks what the figures are made of.
        RuntimeError: verify was handed wrong metadata or a wrong mask.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    draft, verify = (MatrixProducts(gpu_us, device) for gpu_us in (settings.draft_us, settings.verify_us))
    loop = SpeculativeLoop(settings, draft.graph.replay, verify.graph.replay, device)
    unprofiled: dict[Arm, list[float]] = {arm: [] for arm in ARMS}
    profiles: dict[Arm, list[LoopProfile]] = {arm: [] for arm in ARMS}
    for arm in ARMS:  # which also compiles what is compiled at first use
        loop.check(arm)
    shuffled = random.Random(SHUFFLE_SEED)
    for _ in range(settings.repeats):
        for arm in shuffled.sample(ARMS, len(ARMS)):
            unprofiled[arm].append(unprofiled_us(partial(loop.run, arm)) / settings.steps_per_run)
            profiles[arm].append(profiled(partial(loop.run, arm)))
    host_us = _host_us(loop)
    for arm in ARMS:
        loop.check(arm)
    products = {"draft_matrix_products": draft.products, "verify_matrix_products": verify.products}
    return [
        _row(arm, settings)
        | products
        | _recorded(profiles[arm], settings)
        | {"unprofiled_iteration_us": [round(value, 3) for value in unprofiled[arm]], "host_us": host_us[arm]}
        for arm in ARMS
    ]


def _row(arm: Arm, settings: LoopSettings) -> dict[str, Any]:
    return {
        "drafts": arm.drafts.value,
        "builder": arm.builder.value,
        "start": arm.start.value,
        "fix_up": (FixUp.AFTER_DRAFT if arm.drafts is Drafts.TREES else FixUp.NONE).value,
        **asdict(settings),
    }


def _recorded(profiles: Sequence[LoopProfile], settings: LoopSettings) -> dict[str, Any]:
    runs = [iteration_facts(each, settings.warm_up_steps) for each in profiles]
    middle = settings.warm_up_steps + settings.steps // 2
    return {
        "medians": medians(facts for run in runs for facts in run),
        "runs": [[asdict(facts) for facts in run] for run in runs],
        "timeline": two_lanes(profiles[-1].steps[middle]),
    }


def _host_us(loop: SpeculativeLoop) -> dict[Arm, float]:
    calls = {str(arm): (lambda arm=arm: loop.run(arm, steps=1)) for arm in ARMS}
    times = host_time(calls, batches=HOST_BATCHES, calls_per_batch=HOST_CALLS_PER_BATCH)
    return {arm: round(times[str(arm)].median_us, 2) for arm in ARMS}


def measure_fix_up(batch_size: int, num_draft_tokens: int, device: torch.device) -> dict[str, Any]:
    """GPU and host time of writing the packed masks of random trees by itself, JSON-ready."""
    generator = torch.Generator().manual_seed(0)
    parents = random_trees(batch_size, num_draft_tokens, generator=generator).to(device)
    out = torch.zeros_like(pack_tree_mask(parents))
    size_bytes = parents.nbytes + out.nbytes
    work = GpuWork(_prepare_fix_up, {"parents": parents, "out": out}, size_bytes, check=_check_fix_up)
    gpu = measure(work, GRAPH_CLOCK)
    host = host_time({"fix-up": work.call()}, calls_per_batch=HOST_CALLS_PER_BATCH)["fix-up"]
    return {
        "batch_size": batch_size,
        "num_draft_tokens": num_draft_tokens,
        "gpu_us": round(gpu.median_us, 3),
        "gpu_iqr_us": round(gpu.iqr_us, 3),
        "launches": gpu.launches,
        "host_us": round(host.median_us, 3),
        "method": str(gpu.method),
        "device": gpu.device.facts(),
    }


def _prepare_fix_up(parents: Tensor, out: Tensor) -> Callable[[], object]:
    return lambda: pack_tree_mask(parents, out=out)


def _check_fix_up(arguments: Mapping[str, Any]) -> None:
    out: Tensor = arguments["out"]
    assert torch.equal(out.cpu(), pack_tree_mask(arguments["parents"].cpu())), "the mask is not the trees'"
    out.zero_()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.plan_stream", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--draft-us", type=float, nargs="+", default=[100.0, 400.0], help="GPU time of the draft steps")
    parser.add_argument("--verify-us", type=float, nargs="+", default=[1000.0], help="GPU time of the target model")
    sizes = [each.name for each in fields(LoopSettings) if each.name not in ("draft_us", "verify_us")]
    for name in sizes:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(LoopSettings, name))
    parser.add_argument("--out", type=Path, help="also write a JSON file")
    given = vars(parser.parse_args(argv))
    out, draft_times, verify_times = given.pop("out"), given.pop("draft_us"), given.pop("verify_us")
    try:
        loops = [LoopSettings(*times, **given) for times in itertools.product(draft_times, verify_times)]
    except ValueError as error:
        parser.error(str(error))
    if not gpu_is_here():
        return NO_GPU
    device = torch.device("cuda")
    recording = Recording(out, {"method": METHOD, "host_method": HOST_METHOD}, ("arms", "fix_ups"))
    recording.measure(loops, lambda settings: {"arms": measure_arms(settings)}, "loops")
    recording.measure(FIX_UP_POINTS, lambda point: {"fix_ups": [measure_fix_up(*point, device)]}, "masks")
    _print(recording)
    return recording.exit_status


# Column header, what it shows of an arm.
ARM_COLUMNS: Columns = {
    "drafts": lambda row: str(row["drafts"]),
    "builder": lambda row: str(row["builder"]),
    "start": lambda row: str(row["start"]),
    "draft, µs": lambda row: f"{row['medians']['draft_us']:,.1f}",
    "plan launches": lambda row: f"{row['medians']['plan_launches']:g}",
    "plan, µs": lambda row: f"{row['medians']['plan_us']:,.1f}",
    "busy, µs": lambda row: f"{row['medians']['plan_busy_us']:,.1f}",
    "hidden, µs": lambda row: f"{row['medians']['hidden_us']:,.1f}",
    "fix-up, µs": lambda row: f"{row['medians']['fix_up_us']:,.1f}",
    "between, µs": lambda row: f"{row['medians']['between_us']:,.1f}",
    "iteration, µs": lambda row: f"{row['medians']['iteration_us']:,.1f}",
    "unprofiled, µs": lambda row: f"{statistics.median(row['unprofiled_iteration_us']):,.1f}",
    "host, µs": lambda row: f"{row['host_us']:,.1f}",
}
FIX_UP_COLUMNS: Columns = {
    "requests": lambda row: str(row["batch_size"]),
    "draft tokens": lambda row: str(row["num_draft_tokens"]),
    "launches": lambda row: str(row["launches"]),
    "GPU, µs": lambda row: f"{row['gpu_us']:,.2f}",
    "host, µs": lambda row: f"{row['host_us']:,.1f}",
}
TEXT_COLUMNS = ("drafts", "builder", "start")


def _print(recording: Recording) -> None:
    recording.console.print(
        table_of("A speculative iteration", ARM_COLUMNS, recording.result["arms"], words=TEXT_COLUMNS)
    )
    title = f"The packed mask of trees by itself, {GRAPH_CLOCK}"
    recording.console.print(table_of(title, FIX_UP_COLUMNS, recording.result["fix_ups"]))


if __name__ == "__main__":
    sys.exit(main())
