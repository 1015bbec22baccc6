"""The phases of a speculative iteration, and the GPU time of each, read from a profile."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lab.named_enum import NamedEnum
from lab.timing.step_profile import (
    IncompleteProfileError,
    LoopProfile,
    ProfiledStep,
    TraceEvent,
    busy_within_us,
    step_facts,
)


class Phase(NamedEnum):
    """Parts of an iteration, by the names of their ranges in a profile."""

    INPUTS = "inputs"
    DRAFT = "draft"
    PLAN = "plan"
    FIX_UP = "fix-up"
    VERIFY = "verify"


@dataclass(frozen=True)
class IterationFacts:
    """The cost of an iteration, in µs, and its launches: the GPU's kernels, copies and fills.

    Attributes:
        step: the number of the iteration.
        draft_us, plan_us, fix_up_us, verify_us: from the start of a phase's first launch to the end of its last.
        plan_busy_us: the part of `plan_us` in which one of its launches ran.
        hidden_us: the part of `plan_busy_us` that fell into the draft.
        between_us: from the end of the draft to the start of verify.
        iteration_us: from the end of the iteration before to the end of this one.
    """

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
    """Return the facts of each iteration from number `first` on, which must have one before it.

    Raises:
        IncompleteProfileError: as `lab.timing.step_profile.step_facts`, or a phase is missing.
    """
    iteration_us = {each.step: each.step_us for each in step_facts(loop, first)}
    return [_facts(step, iteration_us[step.number]) for step in loop.steps if step.number in iteration_us]


def _facts(step: ProfiledStep, iteration_us: float) -> IterationFacts:
    gpu = {phase: step.launched_in(phase.value) for phase in Phase}
    missing = [phase.value for phase, found in gpu.items() if not found and phase is not Phase.FIX_UP]
    if missing:
        raise IncompleteProfileError(f"step {step.number} has no {', '.join(missing)} on the GPU")
    draft = _bounds_ns(gpu[Phase.DRAFT])
    return IterationFacts(
        step=step.number,
        draft_us=_span_us(gpu[Phase.DRAFT]),
        plan_us=_span_us(gpu[Phase.PLAN]),
        plan_busy_us=busy_within_us(gpu[Phase.PLAN], *_bounds_ns(gpu[Phase.PLAN])),
        plan_launches=len(gpu[Phase.PLAN]),
        hidden_us=busy_within_us(gpu[Phase.PLAN], *draft),
        fix_up_us=_span_us(gpu[Phase.FIX_UP]),
        fix_up_launches=len(gpu[Phase.FIX_UP]),
        between_us=(gpu[Phase.VERIFY][0].start_ns - draft[1]) / 1000,
        verify_us=_span_us(gpu[Phase.VERIFY]),
        iteration_us=iteration_us,
    )


def _bounds_ns(activities: Iterable[TraceEvent]) -> tuple[int, int]:
    listed = list(activities)
    return min(each.start_ns for each in listed), max(each.end_ns for each in listed)


def _span_us(activities: Sequence[TraceEvent]) -> float:
    """Return the time from the first start to the last end; 0 for no activity."""
    if not activities:
        return 0.0
    start_ns, end_ns = _bounds_ns(activities)
    return (end_ns - start_ns) / 1000


def two_lanes(step: ProfiledStep) -> list[dict[str, Any]]:
    """Return one iteration's GPU work for a picture, in the order of its starts.

    Each entry has `stream` ("forward", where verify runs, or "plan"), `phase` (None for what adds the accepted tokens), `name`,
    and `start_us`, `duration_us` from the iteration's first kernel on.
    """
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
