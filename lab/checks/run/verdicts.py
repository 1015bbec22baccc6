"""Define the verdict on a case as data, and compare the results of calls with the expected results."""

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args, get_origin

import torch
from torch import Tensor

from lab.checks.explain.feature import Features
from lab.exit_status import ExitStatus
from lab.named_enum import NamedEnum
from lab.ranges import Ranges
from lab.references.errors import Truth
from lab.wording import printable
from lab.workloads.inputs.expected import SavedTensor
from lab.workloads.inputs.guards import as_integers
from lab.workloads.interfaces import Interface


class Outcome(NamedEnum):
    RIGHT = "right"
    WRONG = "wrong"  # a result is wrong
    DECLINED = "declined"  # nothing was judged: the kernel refused the calls, or the lab cannot judge them
    FAILED = "failed"  # a call raised an error, crashed or did not return
    KNOWN = "known"  # wrong, and a known failure explains it
    DISHONEST = "dishonest"  # the kernel changed the judge


class TooLate(Exception):  # noqa: N818 - nothing is wrong
    """The time of the run was over before the case was begun."""


# Identifies a verdict in a report: the check, the reprs of function, case and ranges, and whether the case is random.
Key = tuple[str, str, str, str, bool]
SHOWN_ELEMENTS = 4  # of a wrong vector
SHOWN_ROWS = 8
JUDGED_WITH = ": judged with "  # in the sentence about a refused call that was judged in an equivalent form
SENTENCES = ("wrongs", "declines", "remarks", "suspicions")  # fields of a judgement
BROKEN = (Outcome.WRONG, Outcome.FAILED, Outcome.DISHONEST)


@dataclass(frozen=True)
class WrongVector:
    where: str  # row, request, head and the worst elements in words
    expected: tuple[float, ...]  # the expected values of these elements
    got: tuple[float, ...]  # their values in the result


@dataclass(frozen=True)
class BitDifference:
    """A call whose output should have the same bits as the output of the case's first call, and has other bits."""

    what: str  # how the call differs from the first one, such as "request 0 alone"
    ulps: float  # largest difference, in units in the last place of the vector's largest element; inf if not finite


@dataclass(frozen=True)
class OutputComparison:
    """Whether an output or LSE differs from the expected one, in which rows, and by how much."""

    failure: str  #: a sentence about what is wrong; "" if nothing is
    worst_ratio: float = 0.0  #: the largest ratio of an error to its bound
    #: bool [num_rows] on the host, True for wrong rows; None if rows could not be compared, such as of a wrong shape
    wrong_rows: Tensor | None = None
    example: WrongVector | None = None  #: the (row, head) vector with the largest error


# Names of results that a check did not name: of a failed call, and of the values that a call returned.
IT_FAILED, RETURNED = "it failed", "what it returned"


@dataclass(frozen=True)
class CheckedResult:
    """One result that was compared in a case, such as the output of a call, and whether it is wrong."""

    name: str  # name of the call within its check
    held: str  # the kind of comparison, a key of `lab.checks.explain.diagnosis.HELD` such as "output"
    features: Features = field(hash=False)  # features (named properties) of the case and the call
    wrong: bool
    # For each request, its features and whether its rows are wrong; () if the requests were not compared separately.
    requests: tuple[tuple[Features, bool], ...] = field(default=(), hash=False)
    example: WrongVector | None = None  # the vector with the largest error


@dataclass(frozen=True)
class Judged:
    """What a check found in a case: the outcome, sentences about errors and refused calls, and the compared results."""

    outcome: Outcome
    wrongs: tuple[str, ...] = ()  # sentences about wrong results and failed calls
    declines: tuple[str, ...] = ()  # sentences about refused calls
    worst_ratio: float = 0.0  # largest ratio of an error to its bound
    judged: int = 0  # number of results that were compared
    results: tuple[CheckedResult, ...] = ()
    output: SavedTensor | None = field(default=None, repr=False, compare=False)  # the first output, for the audit
    remarks: tuple[str, ...] = ()  # notes for the reader, which do not change the outcome
    by_lab: bool = False  # DECLINED because of the lab or this machine, not because of the implementation
    suspicions: tuple[str, ...] = ()  # sentences that say why the case's inputs may be wrong
    differences: tuple[BitDifference, ...] = ()  # only of cases of `lab.checks.properties.invariance`
    # Of a wrong case that was repeated in its own process: "right" or "wrong" there, as are these results
    alone: str = ""

    def __post_init__(self) -> None:
        for name in SENTENCES:  # they quote messages of the kernel
            object.__setattr__(self, name, tuple(map(printable, getattr(self, name))))


@dataclass(frozen=True)
class CaseVerdict:
    """The verdict on one case: the judged function, the check, the case, and what the check found in it."""

    implementation: str  #: name of the implementation
    check: str  #: key of the check, such as "K4"
    interface: Interface  #: the judged function
    case: Any
    device: str
    judged: Judged  #: what the check found
    ranges: Ranges = field(default_factory=Ranges)  #: the parameter values within which the check varied the case
    drawn: bool = False  #: whether the case is random. A wrong random case was shrunk to a smaller wrong case.
    finding: str = ""  #: for a KNOWN case, the page and heading that describe the failure
    number: int = 0  #: number of the case in its report, from 1; 0 without a report
    recorded_in: str = ""  #: path of the report's file, or ""
    #: names of the engines (`lab.checks.parameters.profiles`) that send the case and, if results are wrong, a wrong call
    sent_by: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        return self.judged.outcome

    @property
    def is_wrong_alone(self) -> bool:
        """Return True if the case is wrong, failed or dishonest, unless a repetition in a process of its own was right."""
        return self.outcome in BROKEN and self.judged.alone != "right"

    @property
    def key(self) -> Key:
        return self.check, repr(self.interface), repr(self.case), repr(self.ranges), self.drawn

    @property
    def exit_status(self) -> ExitStatus:
        if self.outcome is Outcome.DISHONEST:
            return ExitStatus.REFUSED
        if self.judged.wrongs or self.outcome in BROKEN:
            return ExitStatus.WRONG
        return ExitStatus.DONE if self.judged.judged else ExitStatus.NOT_JUDGED

    @property
    def reason(self) -> str:
        return "; ".join(self.judged.wrongs or self.judged.declines)

    def __str__(self) -> str:
        is_suspicious = self.outcome is Outcome.RIGHT and self.judged.suspicions
        outcome = f"{self.outcome.value}, but its inputs are suspicious" if is_suspicious else self.outcome.value
        lines = [f"{self.check} of {self.interface.value} is {outcome}: {self.case!r}"]
        lines += [f"  {wrong}" for wrong in self.judged.wrongs]
        lines += [f"  {fate_of(reason)}: {reason}" for reason in self.judged.declines]
        lines += [f"  note: {note}" for note in (*self.judged.suspicions, *self.judged.remarks)]
        lines += [f"  other bits: {each.what}, by up to {each.ulps:.3g} ulp" for each in self.judged.differences]
        if self.finding:
            lines.append(f"  known: {self.finding}")
        return "\n".join(lines)


def fate_of(refusal: str) -> str:
    """Return "judged in an equivalent form" if the sentence `refusal` says that the call was made in one, else "declined"."""
    return "judged in an equivalent form" if JUDGED_WITH in refusal else "declined"


def dishonest(judged: Judged, reason: str) -> Judged:
    return Judged(Outcome.DISHONEST, (reason,), worst_ratio=judged.worst_ratio, judged=judged.judged)


def _has_type(value: Any, declared: Any) -> bool:
    if get_origin(declared) is tuple:
        return isinstance(value, tuple) and all(isinstance(item, get_args(declared)[0]) for item in value)
    return isinstance(value, (int, float) if declared is float else declared)


def credible(judged: Judged) -> Judged:
    """Return the judgement that a worker sent; a DISHONEST one if a field has a wrong type, or if a result is RIGHT with an
    error above its bound: a kernel in the worker changed it. Call this only in a process without the kernel's code.
    """
    # Unpickling sets fields without `__init__`. No worker calls a failure KNOWN.
    values = vars(judged) if type(judged) is Judged else {}
    is_whole = all(_has_type(values.get(each.name, MISSING), each.type) for each in fields(Judged))
    if not is_whole or judged.outcome is Outcome.KNOWN:
        return Judged(Outcome.DISHONEST, ("its worker sent the judge what is no verdict: the kernel is dishonest",))
    if judged.outcome is Outcome.RIGHT and not judged.worst_ratio <= 1:
        reason = (
            f"it is called right with an error of {judged.worst_ratio:.3g} times its bound: what judges it was changed"
        )
        return dishonest(judged, reason)
    return judged


def compare_output(out: Tensor, truth: Truth, least_bound: float = 0.0) -> OutputComparison:
    """Compare each (row, head) vector of an output [num_rows, num_qo_heads, head_dim] with the expected vector by relative L2
    error. Also search all vectors together for a bias that is too small to see in one vector. A relative error up to
    `least_bound` is allowed.
    """
    if out.shape != truth.expected.shape:
        return OutputComparison(_other_shape(out, truth.expected))
    if not out.dtype.is_floating_point:
        return OutputComparison(f"the output is {out.dtype}, which is no floating-point dtype")
    found = truth.compare(out, least_bound)
    wrong_rows, worst_ratio = found.faulty.any(dim=1).cpu(), found.worst_ratio
    if not bool(wrong_rows.any()):
        return OutputComparison("", worst_ratio, wrong_rows)
    ((row, head),) = found.worst(1)
    example = _vector(truth, row, head, truth.expected, out)
    return OutputComparison(truth.wrong_output(found, out), worst_ratio, wrong_rows, example)


def compare_lse(lse: Tensor, truth: Truth) -> OutputComparison:
    """Compare an LSE [num_rows, num_qo_heads] with log2 of the softmax's denominator, which is -inf for a row without keys."""
    failure = truth.wrong_lse(lse)
    if lse.shape != truth.lse_log2.shape or not lse.dtype.is_floating_point:
        return OutputComparison(failure)
    ratio = truth.lse_ratio(lse).cpu()
    is_wrong = ratio > 1
    example = None
    if failure:
        row, head = divmod(int(is_wrong.flatten().to(torch.int8).argmax()), lse.shape[1])
        example = _vector(truth, row, head, truth.lse_log2.unsqueeze(-1), lse.unsqueeze(-1))
    return OutputComparison(failure, max(0.0, *ratio.flatten().tolist(), 0.0), is_wrong.any(dim=1), example)


def compare_bits(out: Tensor, other: Tensor) -> OutputComparison:
    if out.shape != other.shape:
        return OutputComparison(_other_shape(out, other))
    left, right = as_integers(out), as_integers(other)
    differ = (left != right).flatten(1).any(dim=1).cpu()
    if not bool(differ.any()):
        return OutputComparison("", wrong_rows=differ)
    rows = differ.nonzero().flatten().tolist()
    more = "…" if len(rows) > SHOWN_ROWS else ""
    return OutputComparison(f"the bits of rows {rows[:SHOWN_ROWS]}{more} differ", wrong_rows=differ)


def largest_ulps(out: Tensor, other: Tensor) -> float:
    """Return the largest difference of two outputs [num_rows, num_heads, head_dim] of one dtype, in units in the last place
    (ulps) of the largest element in the same (row, head) vector. Return infinity if an element that differs is not finite.
    """
    limits = torch.finfo(out.dtype)
    left, right = out.double(), other.double()
    size = torch.maximum(left.abs(), right.abs()).nan_to_num(posinf=limits.max).amax(-1, keepdim=True)
    place = limits.eps * torch.exp2(size.clamp(min=limits.smallest_normal).log2().floor())
    found = ((left - right).abs() / place)[as_integers(out) != as_integers(other)]
    return float(found.where(found.isfinite(), math.inf).max()) if found.numel() else 0.0


def _other_shape(out: Tensor, expected: Tensor) -> str:
    return f"the output is {list(out.shape)}, not {list(expected.shape)}"


def _vector(truth: Truth, row: int, head: int, expected: Tensor, got: Tensor) -> WrongVector:
    right, computed = expected[row, head].double(), got[row, head].double()
    error = torch.where(computed.isfinite(), (computed - right).abs(), math.inf).nan_to_num(math.inf, posinf=math.inf)
    worst = error.topk(min(SHOWN_ELEMENTS, len(error))).indices.sort().values
    where = f"row {truth.row_of_call(row)} (request {int(truth.request_of_row[row])}), head {head}"
    of = f", elements {', '.join(map(str, worst.tolist()))}" if len(error) > 1 else ""
    return WrongVector(where + of, tuple(right[worst].tolist()), tuple(computed[worst].tolist()))
