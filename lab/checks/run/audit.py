"""Audit a run of the judge: make some right cases again with new data, and judge their outputs in another process.

A kernel that changes the judge in its own process can make a wrong output appear right there. In the audit, that
process (a worker) only sends the output, and a process without the kernel's code judges it. A worker cannot recognise
an audited case, because it sends the first output of every case of the checks in `AUDITED_CHECKS`.
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

AUDITED = 6  # at most, of each function
REFUSED_NOW = "its worker called a case right, and declined it with other contents: the kernel is dishonest"
UNCONFIRMED = "it was called right, and no case of the audit could be judged: nothing confirms the right cases"
NO_OUTPUT = "its worker called an audited case right and sent no output: the kernel is dishonest"


def chosen(verdicts: Sequence[CaseVerdict]) -> list[CaseVerdict]:
    """Return up to `AUDITED` random RIGHT verdicts of each function. Each case gets a new secret seed for its data."""
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
    """Judge some right cases of `verdicts` again with new data, and yield the new verdicts. Judge at least one case;
    before each further case, stop if `is_over()` is True.

    If the lab could judge none of these cases, the last verdict is FAILED, because nothing confirms the right cases.
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
    """Judge the case of `verdict`, which was right with another seed, in a worker. If it is right again, return how a
    process without the kernel's code judges the worker's output. If the kernel refuses the call now, the outcome is
    DISHONEST.
    """
    judged = pool.submit(verdict.check, verdict.case, verdict.ranges)()
    if judged.outcome is Outcome.DECLINED and not judged.by_lab:
        return dishonest(replace(judged, judged=0), REFUSED_NOW)
    if judged.outcome is not Outcome.RIGHT:
        return replace(judged, judged=0)
    return pool.apart(judge_output, verdict.case, str(pool.device), judged.output)


def judge_output(case: Any, device: str, saved: SavedOutput | None) -> Judged:
    """Compare the output that a worker saved with the expected output of the case.

    If `saved` is None, the outcome is DECLINED if the output is larger than `MOST_SAVED_ELEMENTS`, which no worker
    saves, else DISHONEST. If the memory does not suffice for the expected output, the outcome is DECLINED.
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
