"""Right cases once more, with contents that no run had, judged by a process that the kernel's code never entered.

A worker that the kernel is loaded in makes the call and hands over the output alone. What it must be is worked out in another
process, so that nothing that the kernel did to its own makes a wrong output right.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.checks.attention_inputs import build_attention
from lab.checks.forward_pass import build_forward
from lab.checks.isolation import Isolation
from lab.checks.refusals import Declined, Raised, Refusals
from lab.checks.report import CaseVerdict
from lab.checks.trial import Result, Trial, truth_of_call
from lab.checks.verdicts import Judged, Outcome
from lab.workloads.forward_case import ForwardCase

CHECKS = ("K1", "M1")  # whose cases are one call, or one pass
AUDITED = 6  # cases of each function


def chosen(verdicts: Sequence[CaseVerdict]) -> list[CaseVerdict]:
    """Return right cases of each function, which nothing could foresee, with contents that nothing could know."""
    dice = random.SystemRandom()
    right: dict[Any, list[CaseVerdict]] = {}
    for verdict in verdicts:
        if verdict.check in CHECKS and verdict.outcome is Outcome.RIGHT:
            right.setdefault(verdict.interface, []).append(verdict)
    return [
        replace(verdict, case=replace(verdict.case, seed=dice.randrange(1, 2**31)), drawn=True)
        for each in right.values()
        for verdict in dice.sample(each, min(AUDITED, len(each)))
    ]


def audit(isolation: Isolation, verdict: CaseVerdict) -> Judged:
    """Judge a case by the output of a worker and the expectation of a process without the kernel."""
    device = str(isolation.device)
    found = isolation.in_worker(output_of, verdict.case, device, isolation.space, isolation.refusals)
    if isinstance(found, Judged):
        return found
    return isolation.apart(judge_output, verdict.case, device, found)


def output_of(
    implementation: Any, case: Any, device: str, space: Any, refusals: Refusals | None
) -> tuple[Tensor, Tensor | None] | Judged:
    """Return the output and the LSE of a case's call, on the CPU; or that it declines or fails."""
    trial = Trial(implementation, case, torch.device(device), space, refusals)
    try:
        if isinstance(case, ForwardCase):
            forward = build_forward(case, trial.device)
            out = forward.new_out()
            forward.run(trial.engine(), out)
            return forward.rows_of_requests(out).cpu(), None
        result = trial.call(trial.build())
        return result.out.cpu(), None if result.lse is None else result.lse.cpu()
    except Declined as declined:
        return Judged(Outcome.DECLINED, declines=(str(declined),))
    except Raised as failure:
        return Judged(Outcome.FAILED, (f"with contents that no run had: {failure}",))


def judge_output(case: Any, device: str, found: tuple[Tensor, Tensor | None]) -> Judged:
    """Judge the output and the LSE of a case's call, in a process that has not loaded the kernel."""
    where = torch.device(device)
    truth = (
        build_forward(case, where).truth()
        if isinstance(case, ForwardCase)
        else truth_of_call(build_attention(case, where))
    )
    trial = Trial(None, case, where)
    out, lse = (None if each is None else each.to(where) for each in found)
    assert out is not None
    what = "the call, with contents that no run had, judged where the kernel's code never was"
    trial.hold(what, Result(out, lse), truth)
    outcome = Outcome.WRONG if trial.wrongs else Outcome.RIGHT
    return Judged(outcome, tuple(trial.wrongs), (), trial.worst_ratio, trial.judged, tuple(trial.results))
