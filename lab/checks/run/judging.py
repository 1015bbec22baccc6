"""Judge one case in this process, and find out whether the kernel changed functions or settings of the judge."""

import builtins
import functools
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lab.checks.case_run import USUAL_RANGES, CaseRun
from lab.checks.parameters.attention import DISCOVERY
from lab.checks.properties import checks, checks_by_key
from lab.checks.properties.check import Check
from lab.checks.run.support_protocol import KernelError, Refused, Unjudgeable, Unsupported, raised
from lab.checks.run.verdicts import CaseVerdict, Judged, Outcome, TooLate, credible, dishonest
from lab.integrity import Bindings, ChangedBindingsError, bindings, in_words
from lab.interpreter import OTHERWISE_THAN_A_GPU, Bf16, limit_of, noting_bf16
from lab.loading import LoadError, is_same_module, load, name_of
from lab.names import check_key
from lab.ranges import Ranges
from lab.workloads.forward_case import ForwardCase

# Checks whose cases `lab.checks.run.audit` repeats: the first output that they compare is that of the case itself.
AUDITED_CHECKS = ("K1", "K3", "K4", "K5", "K6", "K7", "K13", "K18", "M1")
ROUNDED = ("output", "LSE", "merged")  # kinds of results that are compared within a bound
OF_DTYPES = ("dtype", "kv_dtype", "out_dtype")  # features of a call
# Most error by truncation to bf16, over its bound: one truncation gives 4, and 10 in the bias test
MOST_BY_TRUNCATION = 16.0


@dataclass(frozen=True)
class Refusals:
    """The names of the exceptions by which a kernel refuses a call. Call `resolve`, which imports the exceptions, only in a
    process that loads the kernel, because an exception may be defined in the kernel's module.
    """

    names: tuple[str, ...]  #: of the form "module:attribute" or "file.py:attribute"
    given: tuple[str, ...]  #: the names as the user wrote them
    classes: tuple[type[BaseException], ...] = ()  #: the exceptions if they are imported

    @classmethod
    def of(cls, chosen: str | Sequence[type[BaseException]], kernel: str = "") -> "Refusals":
        """Return the exceptions in `chosen`: classes, or a comma-separated list such as "ValueError,my/kernel.py:Unsupported".

        A name in the list is a built-in exception ("ValueError"), an attribute of a module ("my.errors.Refused") or of a file
        ("my/errors.py:Refused"), or an attribute of the kernel's module ("Unsupported"). If the list has this module under
        another name ("my/kernel.py" for "my.kernel"), the name becomes `kernel`, so that the module is loaded once.
        """
        if not isinstance(chosen, str):
            names = tuple(map(name_of, chosen))
            return cls(names, names, tuple(chosen))
        own, found = kernel.partition(":")[0], dict[str, str]()
        for name in filter(None, map(str.strip, chosen.split(","))):
            where, _, attribute = name.rpartition(":" if ":" in name else ".")
            if not where:
                where = "builtins" if hasattr(builtins, attribute) or not own else own
            elif is_same_module(where, own):
                where = own
            found[f"{where}:{attribute}"] = name
        return cls(tuple(found), tuple(found.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the classes: one may be in a file outside any package. A worker imports it again.
        return Refusals, (self.names, self.given)

    def resolve(self) -> tuple[type[BaseException], ...]:
        """Import the exceptions and return their classes. Raises ValueError if a name is no exception."""
        return self.classes or tuple(map(_exception, self.names, self.given))


def _exception(name: str, given: str) -> type[BaseException]:
    why, found = "", None
    try:
        found = load(name)
    except LoadError as error:
        why = f" ({error})"
    if isinstance(found, type) and issubclass(found, BaseException):
        return found
    raise ValueError(
        f"{given!r} is no exception: name one of Python's, such as NotImplementedError, one of the kernel's module, such as "
        f"Unsupported, or one with its module or file, such as my.errors.Refused or my/errors.py:Refused{why}"
    )


class Task(NamedTuple):
    check: str  # key of the check
    case: Any
    device: str
    ranges: Ranges  # the values within which the check may vary the case
    refusals: Refusals | None = None
    # The case is not begun after this time of `time.monotonic`, which all processes of a machine share.
    end: float = math.inf


def judge_case(
    implementation: Any, check: str, case: Any, device: torch.device | str | None = None, ranges: Ranges = USUAL_RANGES
) -> CaseVerdict:
    """Judge one case of one check in this process.

    Args:
        implementation: a module or object with the functions that the case calls, or its name.
        check: key or name of the check.
        case: a case of this check, such as an `AttentionCase`. Its seed determines the data.
        device: the device to run on; None for a GPU if there is one, else the CPU.
        ranges: the parameter values within which the check may vary the case.
    """
    where = device_of(device)
    name, loaded = named_implementation(implementation)
    (chosen,) = checks_named(check)
    interface = getattr(case, "interface", chosen.interfaces[0])
    judged = credible(judge_task(loaded, Task(chosen.key, case, str(where), ranges)))
    return CaseVerdict(name, chosen.key, interface, case, str(where), judged, ranges)


def judge_forward(implementation: Any, case: ForwardCase, device: torch.device | str | None = None) -> CaseVerdict:
    """Judge one forward pass, from each request's K/V history to a kernel's output, by check M1 (forward_modes).

    The K/V pool, the metadata and the kernel's arguments are built as an engine builds them. All memory that must not be read
    is poisoned. The expected output is computed from the histories, as they were written token by token, and never from a page
    table, a length or an offset. So a wrong table, length or offset fails like a wrong kernel. `implementation` is a module or
    object with the functions of the pass, or its name. If `device` is None, the pass runs on a GPU if there is one.
    """
    return judge_case(implementation, "M1", case, device)


@functools.cache
def noted() -> Bindings:
    """Return a record of the judge's functions and settings, to find changes by a kernel. The first call makes the record."""
    checks_by_key()  # imports all modules of the judge
    return bindings()


def note_current() -> None:
    """Update the record (`noted`) that shows whether a kernel changed functions or settings of the judge. Call this before a
    kernel is loaded or run: afterwards, changes by the kernel would enter the record, and would not be detected.
    """
    if not noted().is_current():
        noted.cache_clear()
        noted()


def judge_task(implementation: Any, task: Task) -> Judged:
    """Judge a case in this process. The outcome is DISHONEST if the kernel changed functions or settings of the judge. Raises
    TooLate if the time `task.end` has passed.
    """
    if time.monotonic() > task.end:
        raise TooLate
    check = ONE_CALL if task.check == DISCOVERY else checks_by_key()[task.check]
    device, folder = torch.device(task.device), os.getcwd()
    refusals = None if task.refusals is None else task.refusals.resolve()
    try:
        judged = run_case(implementation, check, task.case, device, task.ranges, refusals)
    finally:
        os.chdir(folder)  # the kernel may have changed it
    changed = noted().changes()
    return dishonest(judged, in_words(changed)) if changed else judged


def _call_once(run: CaseRun) -> None:
    run.call(run.build())
    run.judged += 1


ONE_CALL = Check(DISCOVERY, "", lambda _: (), _call_once)


def run_case(
    implementation: Any, check: Check, case: Any, device: torch.device, ranges: Ranges, refusals: Refused | None = None
) -> Judged:
    """Judge a case in this process. The outcome is WRONG if a result is wrong, FAILED if a call failed or the check raised an
    error after a call, DECLINED if no result was compared or the lab itself failed, else RIGHT.
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
    except torch.AcceleratorError as error:  # an earlier launch failed; the error is raised at the next synchronization
        run.fail(str(raised(error)))
    except Exception as error:
        kind, limit, is_full = type(error).__name__, limit_of(error), is_of_memory(error)
        sentence = f"{kind}: {error}"
        # What the kernel raised is a KernelError.
        if run.kernel.count and not limit and not is_full:
            run.fail(f"the check stopped at what the implementation returned, or at a bug of the lab's own: {sentence}")
        else:
            run.decline(memory_is_full(kind) if is_full and not limit else failure_of_the_lab(limit or sentence))
            by_lab, run.judged = True, 0  # the results that were compared before say nothing about the remaining ones
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


def failure_of_the_lab(sentence: str) -> str:
    return f"a part of the lab failed, and not the implementation: {sentence}"


def is_of_memory(error: Exception) -> bool:
    # On a CPU, torch raises a RuntimeError.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def memory_is_full(cause: str) -> str:
    # `cause` names an error or signal, without numbers that differ from case to case: equal reasons are counted together.
    return failure_of_the_lab(f"no memory was left ({cause}): judge with fewer --workers")


def without_memory(cause: str) -> Judged:
    """Return the judgement on a case that was not judged because no memory was left. `cause` as in `memory_is_full`."""
    return Judged(Outcome.DECLINED, declines=(memory_is_full(cause),), by_lab=True)


def _explains(bf16: Bf16, run: CaseRun) -> bool:
    # True if a case may be wrong only because Triton's interpreter computes bf16 unlike a GPU. Such a difference can make the
    # numbers of bf16 calls wrong, but not their shapes.
    wrong = [result for result in run.results if result.wrong and result.held != "return"]
    if run.is_misshapen or not all("bf16" in map(result.features.get, OF_DTYPES) for result in wrong):
        return False
    held = {result.held for result in wrong}
    if bf16.computes:
        return held <= {*ROUNDED, "bits"}
    return bf16.truncates and held <= {*ROUNDED} and run.worst_ratio <= MOST_BY_TRUNCATION


def device_of(device: torch.device | str | None) -> torch.device:
    """Return the torch device with a name such as "cuda:1". None stands for the GPU, or for the CPU if there is no GPU."""
    count = torch.cuda.device_count()
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is no device: cpu, cuda, or cuda:1 for the second GPU") from error
    if named.type not in ("cpu", "cuda"):
        raise ValueError(f"nothing is judged on {device!r}: cpu, cuda, or cuda:1 for the second GPU")
    if named.type == "cuda" and (named.index or 0) >= count:
        raise ValueError(f"there is no GPU {str(device)!r} here: torch finds {count or 'none'}")
    return named


def named_implementation(implementation: Any) -> tuple[str, Any]:
    """Return (name, module or object) of an implementation. If `implementation` is a name, import the module of this name."""
    note_current()  # before a module is imported that may change the judge's functions
    if isinstance(implementation, str):
        return implementation, load(implementation)
    return str(getattr(implementation, "__name__", type(implementation).__name__)), implementation


def checks_named(only: str | Sequence[str | Check]) -> tuple[Check, ...]:
    """Return the checks that `only` names by key or name, in the order of keys, and then the `Check` objects in it. If `only`
    is empty, return all checks.
    """
    given = [each for each in only if isinstance(each, Check)]
    names = [only] if isinstance(only, str) and only else [each for each in only if isinstance(each, str)]
    keys = set(map(check_key, names))
    return (*(check for check in checks() if check.key in keys or not (keys or given)), *given)
