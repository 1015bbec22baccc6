"""The phases of a speculative iteration, and the GPU time of each, read from a profile."""

from dataclasses import dataclass
from typing import Any

from lab.named_enum import NamedEnum
from lab.timing.cupti import busy_us, span_us
from studies.step_profile import IncompleteProfileError, LoopProfile, ProfiledStep, busy_within_us, step_facts


class Phase(NamedEnum):
    """Parts of an iteration, by the names of their ranges in a profile."""

    INPUTS = "inputs"
    DRAFT = "draft"
    PLAN = "plan"
    FIX_UP = "fix-up"
    VERIFY = "verify"


@dataclass(frozen=True)
class IterationFacts:
    """The number of an iteration, its cost in µs, and its launches; `studies.plan_stream` says what each name means."""

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
    return [_facts(step, iteration_us[step.number]) for step in loop.steps if step.number in iteration_us]


def _facts(step: ProfiledStep, iteration_us: float) -> IterationFacts:
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
    """Return one iteration's GPU work for a picture; `phase` is None for the kernels that add the accepted tokens."""
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
