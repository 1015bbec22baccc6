"""The audit of a run: repeat some right cases with new data, and compare the outputs in a process without the kernel's code.

A kernel that changes the judge in its own process can make a wrong output appear right there. In the audit, the kernel's worker
only sends the output as bytes, and another process computes the expected output. A worker cannot recognise an audited case,
because it sends the first output of every case of `AUDITED_CHECKS`.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lab.checks.case_run import MOST_SAVED_ELEMENTS, CaseRun, Result
from lab.checks.run.judging import AUDITED_CHECKS, failure_of_the_lab, is_of_memory
from lab.checks.run.verdicts import CaseVerdict, Judged, Outcome, SavedOutput, dishonest
from lab.checks.run.workers import Workers
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.attention import build_attention
from lab.workloads.inputs.forward_pass import build_forward

AUDITED = 6  # cases of each function
REFUSED_NOW = "its worker called a case right, and declined it with other contents: the kernel is dishonest"
UNCONFIRMED = "it was called right, and no case of the audit could be judged: nothing confirms the right cases"
NO_OUTPUT = "its worker called an audited case right and sent no output: the kernel is dishonest"


def chosen(verdicts: Sequence[CaseVerdict]) -> list[CaseVerdict]:
    """Choose up to `AUDITED` right verdicts of each function at random, and give their cases new, secret seeds."""
    dice = random.SystemRandom()
    right: dict[Any, list[CaseVerdict]] = {}
    for verdict in verdicts:
        if verdict.check in AUDITED_CHECKS and verdict.outcome is Outcome.RIGHT:
            right.setdefault(verdict.interface, []).append(verdict)
    return [
        replace(verdict, case=replace(verdict.case, seed=dice.randrange(1, 2**31)), drawn=True)
        for each in right.values()
        for verdict in dice.sample(each, min(AUDITED, len(each)))
    ]


def audited(pool: Workers, verdicts: Sequence[CaseVerdict], is_over: Callable[[], bool]) -> Iterator[CaseVerdict]:
    """Audit some of the right cases in `verdicts`, and yield the audit's verdicts. Stop after the first once `is_over` is
    True.

    If the lab could judge no case of the audit, the last verdict is FAILED, because nothing confirms the right cases.
    """
    is_confirmed, again = False, chosen(verdicts)
    for number, verdict in enumerate(again, 1):
        if number > 1 and is_over():
            return
        judged = audit(pool, verdict)
        is_confirmed |= judged.judged > 0
        if number == len(again) and judged.by_lab and not is_confirmed:
            judged = replace(judged, outcome=Outcome.FAILED, wrongs=(UNCONFIRMED,))
        yield replace(verdict, judged=judged)


def audit(pool: Workers, verdict: CaseVerdict) -> Judged:
    """Judge in a worker a case of `chosen`, which has a new seed and was right with its old one. If it is right, judge the same
    output again in a process without the kernel's code. If the kernel declines the case, the outcome is DISHONEST, because it
    was right with other data.
    """
    judged = pool.submit(verdict.check, verdict.case, verdict.ranges)()
    if judged.outcome is Outcome.DECLINED and not judged.by_lab:
        return dishonest(replace(judged, judged=0), REFUSED_NOW)
    if judged.outcome is not Outcome.RIGHT:
        return replace(judged, judged=0)
    return pool.apart(judge_output, verdict.case, str(pool.device), judged.output)


def judge_output(case: Any, device: str, saved: SavedOutput | None) -> Judged:
    """Compare the output that a worker saved with the expected output of the case.

    If none was saved (None), the outcome is DECLINED if the output is too large to be sent, else DISHONEST. If the memory does
    not suffice for the expected output, the lab cannot judge the case, and the outcome is DECLINED.
    """
    where = torch.device(device)
    run = CaseRun(None, case, where)
    is_pass = isinstance(case, ForwardCase)
    try:
        truth = build_forward(case, where).truth() if is_pass else build_attention(case, where).truth()
    except (MemoryError, RuntimeError) as error:
        if not is_of_memory(error):
            raise
        return Judged(Outcome.DECLINED, declines=(failure_of_the_lab(f"{type(error).__name__}: {error}"),), by_lab=True)
    if saved is None:
        is_large = truth.expected.numel() > MOST_SAVED_ELEMENTS
        return Judged(Outcome.DECLINED) if is_large else Judged(Outcome.DISHONEST, (NO_OUTPUT,))
    what = "the call, with contents that no run had, judged where the kernel's code never was"
    run.expect_close(what, Result(saved.tensor().to(where), None), truth)
    outcome = Outcome.WRONG if run.wrongs else Outcome.RIGHT
    return Judged(outcome, tuple(run.wrongs), (), run.worst_ratio, run.judged, tuple(run.results))
