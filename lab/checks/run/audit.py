"""Audit a run of the judge: make the calls of some right cases again, and judge the outputs in a process without the kernel.

A kernel that changes the judge in its own process can make a wrong output appear right there. In the audit, the process with
the kernel only sends its output. The kernel cannot recognise an audited case, because the first output of every case is sent.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from lab.checks.case_run import MOST_SAVED_ELEMENTS, USUAL_RANGES, CaseRun, Result
from lab.checks.parameters.calls import built_call
from lab.checks.parameters.models import FAMILIES, Configuration
from lab.checks.run.judging import AUDITED_CHECKS, is_of_memory, without_memory
from lab.checks.run.verdicts import CaseVerdict, Judged, Outcome, dishonest
from lab.checks.run.workers import Workers
from lab.ranges import Ranges
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.attention import build_attention
from lab.workloads.inputs.expected import SavedTensor
from lab.workloads.inputs.forward_pass import build_forward

AUDITED = 8  # most configurations, and most other cases, of each function: at least one of each audited check
REFUSED_NOW = "its worker called a case right, and declined it when it was made again: the kernel is dishonest"
UNCONFIRMED = "it was called right, and no case of the audit could be judged: nothing confirms the right cases"
RIGHT_ALONE = "right in its own process: the implementation keeps state, or its results change from run to run"
NO_OUTPUT = "its worker called an audited case right and sent no output: the kernel is dishonest"


def chosen(verdicts: Sequence[CaseVerdict]) -> list[list[CaseVerdict]]:
    """Choose at random the right cases that the audit judges again. Return their verdicts, one list for each function.

    A list has up to `AUDITED` cases of the class `Configuration`, and up to `AUDITED` cases of all other classes, such as
    `ForwardCase`. Only the cases of other classes get new random seeds, which the kernel cannot know.
    """
    dice = random.SystemRandom()
    groups: dict[Any, tuple[list[CaseVerdict], list[CaseVerdict]]] = {}
    for verdict in verdicts:
        is_configuration = isinstance(verdict.case, Configuration)
        has_output = not is_configuration or verdict.interface in FAMILIES
        if verdict.check in AUDITED_CHECKS and verdict.outcome is Outcome.RIGHT and has_output:
            # A configuration keeps its seed, which also determines lengths.
            groups.setdefault(verdict.interface, ([], []))[is_configuration].append(verdict)
    found = []
    for others, configurations in groups.values():
        again, same = (_of_all_checks(dice.sample(each, len(each))) for each in (others, configurations))
        redrawn = [replace(each, case=replace(each.case, seed=dice.randrange(1, 2**31))) for each in again]
        found.append([replace(each, drawn=True) for each in (*redrawn, *same)])
    return found


def _of_all_checks(verdicts: Sequence[CaseVerdict]) -> list[CaseVerdict]:
    numbers: dict[str, Iterator[int]] = defaultdict(count)  # the first verdict of each check, then the second of each
    return sorted(verdicts, key=lambda verdict: next(numbers[verdict.check]))[:AUDITED]


def audited(pool: Workers, verdicts: Sequence[CaseVerdict], is_over: Callable[[], bool]) -> Iterator[CaseVerdict]:
    """Judge some right cases of each function again, and yield the new verdicts. After the run's time is over (`is_over`), stop
    as soon as one case of the function was judged. If errors of the lab leave all of them unjudged, the last verdict is FAILED.
    """
    for again in chosen(verdicts):
        is_confirmed = is_prevented = False
        for number, verdict in enumerate(again, 1):
            judged = audit(pool, verdict)
            is_confirmed, is_prevented = is_confirmed or judged.judged > 0, is_prevented or judged.by_lab
            is_unconfirmed = is_prevented and not is_confirmed
            if number == len(again) and is_unconfirmed:
                judged = replace(judged, outcome=Outcome.FAILED, wrongs=(UNCONFIRMED,))
            yield replace(verdict, judged=judged)
            if is_over() and not is_unconfirmed:
                break


def audit(pool: Workers, verdict: CaseVerdict) -> Judged:
    """Judge a right case again in a worker. If the worker finds it right, let a process without the kernel's code judge the
    output. Return the last judgement; DISHONEST if the kernel now refuses the calls.
    """
    judged = pool.submit(verdict.check, verdict.case, verdict.ranges)()
    if judged.outcome is Outcome.DECLINED and not judged.by_lab:
        return dishonest(replace(judged, judged=0), REFUSED_NOW)
    if judged.outcome is not Outcome.RIGHT:
        return replace(judged, judged=0)
    return pool.apart(judge_output, verdict.case, str(pool.device), judged.output, verdict.ranges)


def confirmed(verdict: CaseVerdict, alone: Judged) -> CaseVerdict:
    """Return the verdict on a wrong case that was repeated in its own process, with the judgement `alone`. It has the results
    of that process, and stays WRONG if it is right there. If the repetition was declined or failed, nothing changes.
    """
    if alone.outcome is Outcome.RIGHT:
        wrongs, worst_ratio = (*verdict.judged.wrongs, RIGHT_ALONE), verdict.judged.worst_ratio
        alone = replace(alone, outcome=Outcome.WRONG, wrongs=wrongs, worst_ratio=worst_ratio, alone="right")
    elif alone.outcome is Outcome.WRONG:
        alone = replace(alone, alone="wrong")
    is_judged = alone.outcome in (Outcome.WRONG, Outcome.DISHONEST)
    return replace(verdict, judged=replace(alone, output=None)) if is_judged else verdict


def judge_output(case: Any, device: str, saved: SavedTensor | None, ranges: Ranges = USUAL_RANGES) -> Judged:
    """Compare the output that a worker sent with the expected output of the case's first call. The outcome is DECLINED if the
    output is too large to be sent (more than `MOST_SAVED_ELEMENTS`), if it has no rows, or if the memory does not suffice.
    """
    where = torch.device(device)
    run = CaseRun(None, case, where)
    try:
        build: Callable[..., Any] = build_forward if isinstance(case, ForwardCase) else build_attention
        call = built_call(case, ranges, where) if isinstance(case, Configuration) else build(case, where)
        if isinstance(case, Configuration) and not call.rows:
            return Judged(Outcome.DECLINED)
        truth = call.truth()
    except (MemoryError, RuntimeError) as error:
        if not is_of_memory(error):
            raise
        return without_memory(type(error).__name__)
    if saved is None:
        is_sent = truth.expected.numel() <= MOST_SAVED_ELEMENTS
        return Judged(Outcome.DISHONEST, (NO_OUTPUT,)) if is_sent else Judged(Outcome.DECLINED)
    what = "the call, made again and judged where the kernel's code never was"
    run.expect_close(what, Result(saved.tensor(where), None), truth)
    outcome = Outcome.WRONG if run.wrongs else Outcome.RIGHT
    return Judged(outcome, tuple(run.wrongs), (), run.worst_ratio, run.judged, tuple(run.results))
