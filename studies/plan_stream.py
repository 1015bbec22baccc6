"""How much time does it save to plan verify during the draft (SGLang's PR 25925), and what does a tree's fix-up cost?

    lab experiments plan-stream --out plan_stream.json
    lab experiments plan-stream --draft-us 100,400,1600 --verify-us 2000 --batch-size 1 --out plan_stream.json

A loop of speculative iterations. Each makes its batch on the device, replays a CUDA graph of matrix products of a chosen
duration in place of the draft steps, plans the metadata of verify, fixes up what depends on the draft, replays another graph in
place of the target model, and adds the accepted tokens to the lengths. The variants are all combinations of:

    drafts   chains, which need no fix-up; or trees, whose packed mask is written after the draft from each token's parent
    builder  torch operations, many small launches as in SGLang 0.5.13; or one fused launch as in 0.5.23
    start    in line, after the draft on its stream; on a second stream after the draft; on a second stream after the inputs

The runs of the variants are interleaved, in an order reshuffled each round. Each is profiled, and its first iterations are left
out. The metadata that verify gets is checked before and after. What the table says, per iteration, as medians:

    plan         GPU: from the start of the plan's first kernel or copy to the end of its last
    busy         GPU: the part of that time in which one of them ran
    hidden       GPU: the part of the busy time that fell into the draft
    fix-up       GPU: from the start of its first kernel to the end of its last; none for chains
    between      GPU: from the end of the draft to the start of verify; what is left of plan and fix-up on the critical path
    iteration    GPU: from the end of the iteration before to the end of this one
    unprofiled   the same without a profile, by the host's clock over all iterations of a run
    host         what the host needs to launch an iteration, without a profile, the GPU's queue drained before each batch

CUPTI and the annotations make the host slower, by a microsecond or so a launch. The matrix products fill nearly all of the GPU,
so a plan that overlaps them may take longer than alone. The mask is also timed by itself, replayed in a CUDA graph.
"""

import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.mha.metadata import MetadataBuilder, build_mha_metadata
from lab.metadata.speculation.plan_stream import (
    ChainVerify,
    FixUp,
    PlannedVerify,
    PlanStart,
    PlanStream,
    TreeMaskVerify,
    VerifyBuffers,
)
from lab.metadata.speculation.verify_mask import pack_tree_mask
from lab.named_enum import NamedEnum
from lab.reports.tables import Table, number
from lab.timing.cupti import busy_us, span_us
from lab.timing.host_time import METHOD as HOST_METHOD
from lab.timing.host_time import host_time
from lab.timing.work import GpuWork
from studies.loops import METHOD, LoopSettings, LoopStudy, MatrixProducts, Steps, VerifyLoop, WarmUpSteps, facts_alone
from studies.recording import Formats, Recorded, table_of
from studies.step_profile import IncompleteProfileError, LoopProfile, ProfiledStep, busy_within_us, medians, step_facts
from studies.study import Part, count, times_us
from studies.variants import WARM

Handed = TypeVar("Handed")

SHUFFLE_SEED = 0
# Few enough for the driver's queue of about a thousand launches, at up to sixty an iteration.
HOST_BATCHES, HOST_CALLS_PER_BATCH = 20, 8
# (requests, draft tokens of each) whose masks are written.
FIX_UP_POINTS = tuple(itertools.product((1, 8, 64, 256), (4, 8, 16, 64)))


class Drafts(NamedEnum):
    """The shape of the drafts. Chains need no fix-up."""

    CHAINS = "chains"
    TREES = "trees"


class Phase(NamedEnum):
    """Parts of an iteration, by the names of their ranges in a profile."""

    INPUTS = "inputs"
    DRAFT = "draft"
    PLAN = "plan"
    FIX_UP = "fix-up"
    VERIFY = "verify"


@dataclass(frozen=True)
class Planning:
    drafts: Drafts
    builder: MetadataBuilder
    start: PlanStart

    def __str__(self) -> str:
        return f"{self.drafts.value}, {self.builder.value}, {self.start.value}"


VARIANTS = tuple(itertools.starmap(Planning, itertools.product(Drafts, MetadataBuilder, PlanStart)))


@dataclass(frozen=True, kw_only=True)
class PlanLoopSettings(LoopSettings):
    """The settings of a loop of speculative iterations. GPU times are met to within about 30 µs on an H200."""

    draft_us: Annotated[float, times_us("GPU time of the draft steps", "100,400")]
    verify_us: Annotated[float, times_us("GPU time of the target model", "1000")]
    max_context_len: Annotated[int, count("most tokens of a request, which the page tables have room for")] = 131072
    warm_up_steps: WarmUpSteps = 3
    steps: Steps = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest > self.max_context_len:
            raise ValueError(
                f"max_context_len={self.max_context_len} must hold the {self.longest} tokens of the last step"
            )


class MarkedPlanStream(PlanStream):
    """A plan stream whose parts are ranges in a profile."""

    def _plan(self, batch: ForwardBatch, inputs_final: torch.cuda.Event | None) -> PlannedVerify:
        with record_function(Phase.PLAN.value):
            return super()._plan(batch, inputs_final)

    def _fix_up(self, planned: PlannedVerify) -> None:
        with record_function(Phase.FIX_UP.value):
            super()._fix_up(planned)


class SpeculativeLoop(VerifyLoop[Planning]):
    """Speculative iterations of all variants over the same requests. `draft` and `verify` launch matrix products."""

    def __init__(
        self,
        settings: PlanLoopSettings,
        draft: Callable[[], object],
        verify: Callable[[], object],
        device: torch.device,
    ) -> None:
        super().__init__(settings, settings.max_context_len, device)
        self.draft = draft
        self.verify = verify
        # Other trees in each iteration.
        shape = (settings.steps_per_run, settings.batch_size, settings.num_draft_tokens)
        self.parents = random_trees(*shape, generator=self.generator).to(device)
        self.planners = {variant: self._planner(variant) for variant in VARIANTS}

    def step(self, variant: Planning, seq_lens: Tensor, number: int) -> Tensor:
        return self._iterate(variant, seq_lens, number, self._verify)[1]

    def check(self, variant: Planning) -> None:
        """Run all iterations. Raise RuntimeError unless the metadata of each verify pass equals newly built metadata."""
        seq_lens = self.first_seq_lens
        received: list[tuple[Tensor, dict[str, Tensor]]] = []
        for step in range(self.settings.steps_per_run):
            before = seq_lens
            copies, seq_lens = self._iterate(variant, before, step, PlannedVerify.copies)
            received.append((before, copies))
        for step, (lens, copies) in enumerate(received):
            for name, expected in self._expected(variant, lens, step).items():
                if not torch.equal(self._live(name, copies[name], lens), self._live(name, expected, lens)):
                    raise RuntimeError(f"{variant}: in iteration {step} verify got a wrong {name} for its batch")

    def _iterate(
        self, variant: Planning, seq_lens: Tensor, number: int, verify: Callable[[PlannedVerify], Handed]
    ) -> tuple[Handed, Tensor]:
        with record_function(Phase.INPUTS.value):
            batch = self.batch(seq_lens)

        def draft(buffers: VerifyBuffers) -> None:
            with record_function(Phase.DRAFT.value):
                self.draft()
                if buffers[0] is not None:
                    buffers[0].copy_(self.parents[number])

        return self.planners[variant].run(batch, draft, verify), seq_lens + self.accepted

    def _verify(self, planned: PlannedVerify) -> None:
        with record_function(Phase.VERIFY.value):
            self.verify()

    def _planner(self, variant: Planning) -> MarkedPlanStream:
        verify = TreeMaskVerify if variant.drafts is Drafts.TREES else ChainVerify
        settings, attention = self.settings, TRTLLMMHABackend(builder=variant.builder)
        backend = verify(self.pool, settings.num_draft_tokens, [settings.batch_size], attention)
        return MarkedPlanStream(backend, variant.start)

    def _expected(self, variant: Planning, seq_lens: Tensor, number: int) -> dict[str, Tensor]:
        batch = self.batch(seq_lens)
        mask = pack_tree_mask(self.parents[number]) if variant.drafts is Drafts.TREES else None
        return PlannedVerify(batch, build_mha_metadata(batch, self.pool), mask).tensors()

    def _live(self, name: str, tensor: Tensor, seq_lens: Tensor) -> Tensor:
        """Return a copy of a page table without cells after the requests' pages, in which the builders differ."""
        if name != "page_table":
            return tensor
        pages = -(-(seq_lens + self.settings.num_draft_tokens) // self.settings.page_size)
        return tensor.masked_fill(torch.arange(tensor.shape[1], device=tensor.device) >= pages[:, None], 0)


def random_trees(*shape: int, generator: torch.Generator) -> Tensor:
    """Draw random draft trees: parents, int64 [..., d]. A parent is an earlier draft token, or -1."""
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * (torch.arange(shape[-1]) + 1)).long() - 1


@dataclass(frozen=True)
class IterationFacts:
    """The number of an iteration, its times in µs, and its numbers of launches, as in the study's table."""

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


def iteration_facts(loop: LoopProfile, first: int) -> list[IterationFacts]:
    iteration_us = {each.step: each.step_us for each in step_facts(loop, first)}
    return [_iteration_facts(step, iteration_us[step.number]) for step in loop.steps if step.number in iteration_us]


def _iteration_facts(step: ProfiledStep, iteration_us: float) -> IterationFacts:
    gpu = {phase: step.launched_in(phase.value) for phase in Phase}
    missing = [phase.value for phase, found in gpu.items() if not found and phase is not Phase.FIX_UP]
    if missing:
        raise IncompleteProfileError(f"step {step.number} has no {', '.join(missing)} on the GPU")
    draft, plan, fix_up, verify = (gpu[phase] for phase in (Phase.DRAFT, Phase.PLAN, Phase.FIX_UP, Phase.VERIFY))
    draft_end_ns = max(each.end_ns for each in draft)
    return IterationFacts(
        step=step.number,
        draft_us=span_us(draft),
        plan_us=span_us(plan),
        plan_busy_us=busy_us(plan),
        plan_launches=len(plan),
        hidden_us=busy_within_us(plan, draft[0].start_ns, draft_end_ns),
        fix_up_us=span_us(fix_up),
        fix_up_launches=len(fix_up),
        between_us=(verify[0].start_ns - draft_end_ns) / 1000,
        verify_us=span_us(verify),
        iteration_us=iteration_us,
    )


def two_lanes(step: ProfiledStep) -> list[dict[str, Any]]:
    """Return one iteration's GPU work for a picture. Kernels that add the accepted tokens have the `phase` None."""
    phase_of = {id(each): phase.value for phase in Phase for each in step.launched_in(phase.value)}
    forward = step.launched_in(Phase.VERIFY.value)[0].lane
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


def measure_plannings(settings: PlanLoopSettings) -> list[dict[str, Any]]:
    """Measure all variants of a loop, with interleaved runs. Raises RuntimeError for wrong metadata or a wrong mask."""
    device = torch.device("cuda", torch.cuda.current_device())
    draft, verify = (MatrixProducts(gpu_us, device) for gpu_us in (settings.draft_us, settings.verify_us))
    loop = SpeculativeLoop(settings, draft.graph.replay, verify.graph.replay, device)
    for variant in VARIANTS:  # which also compiles what is compiled at first use
        loop.check(variant)
    shuffled = random.Random(SHUFFLE_SEED)
    rounds = [shuffled.sample(VARIANTS, len(VARIANTS)) for _ in range(settings.repeats)]
    runs = loop.measure(rounds)
    calls = {str(variant): partial(loop.run, variant, steps=1) for variant in VARIANTS}
    host = host_time(calls, batches=HOST_BATCHES, calls_per_batch=HOST_CALLS_PER_BATCH)
    for variant in VARIANTS:
        loop.check(variant)
    first = settings.warm_up_steps
    return [
        {
            "drafts": variant.drafts.value,
            "builder": variant.builder.value,
            "start": variant.start.value,
            "fix_up": (FixUp.AFTER_DRAFT if variant.drafts is Drafts.TREES else FixUp.NONE).value,
            **asdict(settings),
            "draft_matrix_products": draft.products,
            "verify_matrix_products": verify.products,
            **found.facts(partial(iteration_facts, first=first), medians),
            "timeline": two_lanes(found.profiles[-1].steps[first + settings.steps // 2]),
            "unprofiled_iteration_us": found.unprofiled_us,
            **host[str(variant)].facts(),
        }
        for variant, found in ((variant, runs[variant]) for variant in VARIANTS)
    ]


def measure_fix_up(batch_size: int, num_draft_tokens: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    parents = random_trees(batch_size, num_draft_tokens, generator=generator).cuda()
    out = torch.zeros_like(pack_tree_mask(parents))
    work = GpuWork.of(pack_tree_mask, parents.nbytes + out.nbytes, parents=parents, out=out)
    return {
        "batch_size": batch_size,
        "num_draft_tokens": num_draft_tokens,
        **facts_alone(replace(work, check=_check_fix_up), "gpu"),
        **host_time({"fix-up": work.call()}, calls_per_batch=HOST_CALLS_PER_BATCH)["fix-up"].facts(),
    }


def _check_fix_up(arguments: Mapping[str, Any]) -> None:
    out: Tensor = arguments["out"]
    assert torch.equal(out.cpu(), pack_tree_mask(arguments["parents"].cpu())), "the mask is not the trees'"
    out.zero_()


VARIANT_COLUMNS: Formats = {
    "drafts": "{drafts}",
    "builder": "{builder}",
    "start": "{start}",
    "draft, µs": "{medians[draft_us]:,.1f}",
    "plan launches": "{medians[plan_launches]:g}",
    "plan, µs": "{medians[plan_us]:,.1f}",
    "busy, µs": "{medians[plan_busy_us]:,.1f}",
    "hidden, µs": "{medians[hidden_us]:,.1f}",
    "fix-up, µs": "{medians[fix_up_us]:,.1f}",
    "between, µs": "{medians[between_us]:,.1f}",
    "iteration, µs": "{medians[iteration_us]:,.1f}",
    "unprofiled, µs": lambda row: number(statistics.median(row["unprofiled_iteration_us"]), 1),
    "host, µs": "{host_us:,.1f}",
}
FIX_UP_COLUMNS: Formats = {
    "requests": "{batch_size}",
    "draft tokens": "{num_draft_tokens}",
    "launches": "{launches}",
    "GPU, µs": "{gpu_us:,.2f}",
    "host, µs": "{host_us:,.1f}",
}


@dataclass(frozen=True)
class PlanStreamStudy(LoopStudy):
    """Measures loops of speculative iterations, and the fix-ups alone."""

    lists = ("arms", "fix_ups")
    settings = PlanLoopSettings

    @property
    def parts(self) -> Sequence[Part]:
        return [
            Part(self.loops, lambda settings: {"arms": measure_plannings(settings)}, "loops"),
            Part(FIX_UP_POINTS, lambda point: {"fix_ups": [measure_fix_up(*point)]}, "masks"),
        ]

    def method(self) -> Mapping[str, Any]:
        method = METHOD.format(part="iteration and phase", steps="iterations")
        return {"method": method, "host_method": HOST_METHOD}

    def answer(self, result: Recorded) -> Iterable[Table]:
        yield table_of("A speculative iteration", VARIANT_COLUMNS, result["arms"])
        yield table_of(f"The packed mask of trees by itself, {WARM}", FIX_UP_COLUMNS, result["fix_ups"])
