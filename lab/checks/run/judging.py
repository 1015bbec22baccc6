"""Judge one case in this process, and find out whether the kernel changed what judges it."""

import functools
import time
from typing import Any, NamedTuple

import torch

from lab.checks.case_run import CaseRun
from lab.checks.parameters.attention import DISCOVERY
from lab.checks.properties import checks_by_key
from lab.checks.properties.check import Check
from lab.checks.run.support_protocol import (
    KernelError,
    RefusalNames,
    Refusals,
    Unjudgeable,
    Unsupported,
    raised,
    resolved,
)
from lab.checks.run.verdicts import Judged, Outcome, TooLate, dishonest
from lab.integrity import Bindings, ChangedBindingsError, bindings, in_words
from lab.interpreter import OTHERWISE_THAN_A_GPU, Bf16, limit_of, noting_bf16
from lab.loading import working_folder_kept
from lab.ranges import Ranges

AUDITED_CHECKS = ("K1", "M1")  # whose cases are one call, or one pass; see `lab.checks.run.audit`
ROUNDED = ("output", "LSE", "merged")  # kinds of results that are held for their errors
OF_DTYPES = ("dtype", "kv_dtype", "out_dtype")  # features of a call
MOST_BY_TRUNCATION = 16.0  # of an error over its bound; one cut makes 4, and 10 of a mean slope


class Task(NamedTuple):
    """A case to be judged, and what a worker needs for it."""

    check: str  # its key
    case: Any
    device: str
    ranges: Ranges  # within which the check may vary the case
    refusals: Refusals | RefusalNames | None
    end: float  # it is not begun after this time of `time.monotonic`, which all processes of a machine share


@functools.cache
def noted() -> Bindings:
    """Return the functions and settings that judge a kernel, as recorded at the first call: before any kernel was loaded."""
    checks_by_key()  # which imports all that judges
    return bindings()


@working_folder_kept()
def judge_task(implementation: Any, task: Task) -> Judged:
    """Judge one case in this process. The outcome is DISHONEST if the kernel changed functions or settings of the judge.

    Raises:
        TooLate: the task's end time has passed.
    """
    if time.monotonic() > task.end:
        raise TooLate
    check, device = _check(task.check), torch.device(task.device)
    judged = run_case(implementation, check, task.case, device, task.ranges, resolved(task.refusals))
    changed = noted().changes()
    return dishonest(judged, in_words(changed)) if changed else judged


@functools.cache
def _check(key: str) -> Check:
    of_one_call = Check(DISCOVERY, DISCOVERY, "", lambda *_: (), _call_once)
    return of_one_call if key == DISCOVERY else checks_by_key()[key]


def _call_once(run: CaseRun) -> None:
    """Make the call of a case once. The case counts as judged if the call returns, whatever its result.
    `lab.checks.parameters.attention.discover` uses this as a check to find out what a function accepts.
    """
    run.call(run.build())
    run.judged += 1


def run_case(
    implementation: Any, check: Check, case: Any, device: torch.device, ranges: Ranges, refusals: Refusals | None = None
) -> Judged:
    """Judge one case in this process. It is WRONG if a result is wrong, FAILED if a call failed or an error ended the check,
    and DECLINED if nothing was compared.
    """
    run = CaseRun(implementation, case, device, ranges, refusals, saves_output=check.key in AUDITED_CHECKS)
    by_lab, bf16 = False, Bf16()
    try:
        with noting_bf16() as bf16:
            check.judge(run)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Unsupported as declined:
        run.decline(str(declined))
        by_lab = isinstance(declined, Unjudgeable)
    except KernelError as failure:
        run.fail(str(failure))
    except ChangedBindingsError as error:
        return dishonest(Judged(Outcome.DISHONEST, judged=run.judged), str(error))
    except torch.AcceleratorError as error:  # of a launch: it shows where the device is next waited for
        run.fail(str(raised(error)))
    except Exception as error:
        sentence, limit = f"{type(error).__name__}: {error}", limit_of(error)
        if run.kernel.count and not limit:
            run.fail(f"the check stopped at what the implementation returned, or at a bug of the lab's own: {sentence}")
        else:
            run.decline(f"a part of the lab failed, and not the implementation: {limit or sentence}")
            by_lab = True
    if run.wrongs and _explains(bf16, run):
        run.wrongs, run.results, run.judged = [], [], 0
        run.declines, by_lab = [OTHERWISE_THAN_A_GPU], True
    outcome = Outcome.RIGHT if run.judged else Outcome.DECLINED
    if run.wrongs or run.failures:
        outcome = Outcome.WRONG if run.wrongs else Outcome.FAILED
    found = (*run.wrongs, *run.failures), tuple(run.declines), run.worst_ratio, run.judged
    remarks = (*run.remarks, *run.kernel.remarks)
    return Judged(
        outcome, *found, tuple(run.results), run.output, remarks, by_lab, tuple(run.suspicions), tuple(run.differences)
    )


def _explains(bf16: Bf16, run: CaseRun) -> bool:
    """Return True if what Triton's interpreter did with bf16 can make all wrong results of a case: wrong numbers, of calls with
    bf16 tensors.
    """
    wrong = [result for result in run.results if result.wrong and result.held != "return"]  # what has failed stays so
    if run.is_misshapen or not all("bf16" in map(result.features.get, OF_DTYPES) for result in wrong):
        return False
    held = {result.held for result in wrong}
    if bf16.computes:
        return held <= {*ROUNDED, "bits"}
    return bf16.truncates and held <= {*ROUNDED} and run.worst_ratio <= MOST_BY_TRUNCATION
