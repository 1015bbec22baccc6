"""Verdicts as data: the verdict on a case has the case and its judgement (`Judged`), which is what a check found in it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lab.checks.explain.feature import Features
from lab.exit_status import ExitStatus
from lab.named_enum import NamedEnum
from lab.ranges import Ranges
from lab.wording import printable
from lab.workloads.interfaces import Interface


class Outcome(NamedEnum):
    RIGHT = "right"
    WRONG = "wrong"  # a result is wrong
    DECLINED = "declined"  # nothing was judged: the kernel refused the calls, or the lab cannot judge them
    FAILED = "failed"  # a call raised an error, crashed or did not return
    KNOWN = "known"  # wrong, and a known failure explains it
    DISHONEST = "dishonest"  # the kernel changed the judge


class TooLate(Exception):  # noqa: N818 - nothing is wrong
    """The run's time was over before the case was begun."""


# Identifies a verdict in a report: the check, the reprs of function, case and ranges, and whether the case is random.
Key = tuple[str, str, str, str, bool]
BROKEN = (Outcome.WRONG, Outcome.FAILED, Outcome.DISHONEST)


@dataclass(frozen=True)
class WrongVector:
    """A wrong (row, head) vector of an output or LSE: expected and computed values where the errors are largest."""

    where: str  # row, request, head and elements in words
    expected: tuple[float, ...]  # the expected values of these elements
    got: tuple[float, ...]  # their values in the result


@dataclass(frozen=True)
class BitDifference:
    """A variant of a case's first call (the base call) whose output should have the same bits, but has others."""

    what: str  # how the variant differs from the base call, such as "request 0 alone"
    ulps: float  # largest difference, in units in the last place of the vector's largest element; inf if not finite


# Names of results that a check did not name: of a failed call, and of the values that a call returned.
IT_FAILED, RETURNED = "it failed", "what it returned"


@dataclass(frozen=True)
class CheckedResult:
    """One compared result of a case, such as a call's output against the expected output, and whether it is wrong."""

    name: str  # name of the call within its check
    held: str  # the kind of comparison, a key of `lab.checks.explain.diagnosis.HELD` such as "output"
    features: Features = field(hash=False)  # features (named properties) of the case and the call
    wrong: bool
    # For each request, its features and whether its rows are wrong; () if the requests were not compared separately.
    requests: tuple[tuple[Features, bool], ...] = field(default=(), hash=False)
    example: WrongVector | None = None  # the vector with the largest error


@dataclass(frozen=True)
class SavedOutput:
    """An output tensor as its dtype, shape and bytes. Another process can read it without running code of the kernel."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, out: Tensor) -> "SavedOutput":
        plain = out.detach().cpu().contiguous()
        return cls(out.dtype, tuple(out.shape), plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")

    def tensor(self) -> Tensor:
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Judged:
    """The judgement of one case: the outcome, sentences about errors and refused calls, and the compared results."""

    outcome: Outcome
    wrongs: tuple[str, ...] = ()  # sentences about wrong results and failed calls
    declines: tuple[str, ...] = ()  # sentences about refused calls
    worst_ratio: float = 0.0  # largest ratio of an error to its bound
    judged: int = 0  # number of results that were compared
    results: tuple[CheckedResult, ...] = ()
    # The first output of a case that may be audited (`lab.checks.run.audit`)
    output: SavedOutput | None = field(default=None, repr=False, compare=False)
    remarks: tuple[str, ...] = ()  # notes for the reader, which do not change the outcome
    by_lab: bool = False  # DECLINED because of the lab or this machine, not because of the implementation
    suspicions: tuple[str, ...] = ()  # sentences that say why the case's inputs may be wrong
    differences: tuple[BitDifference, ...] = ()  # only of cases of `lab.checks.properties.invariance`

    def __post_init__(self) -> None:
        for name in ("wrongs", "declines", "remarks", "suspicions"):  # the sentences quote messages of the kernel
            object.__setattr__(self, name, tuple(map(printable, getattr(self, name))))


@dataclass(frozen=True)
class CaseVerdict:
    """The verdict on one case of a run: which check judged which function in this case, and what it found."""

    implementation: str  #: name of the implementation
    check: str  #: key of the check, such as "K4"
    interface: Interface  #: the judged function
    case: Any
    device: str
    judged: Judged  #: what the check found
    ranges: Ranges = field(default_factory=Ranges)  #: the parameter values within which the check varied the case
    drawn: bool = False  #: whether the case is random. A wrong random case was shrunk to a smaller wrong case.
    finding: str = ""  #: for a KNOWN case, the page and heading that describe the failure
    #: number of the case in its report, from 1; 0 without a report. A run that continues an earlier report keeps its numbers.
    number: int = 0
    recorded_in: str = ""  #: path of the report's file, or ""
    #: names of the engines (`lab.checks.parameters.profiles`) that send the case and, if results are wrong, a wrong call
    sent_by: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        return self.judged.outcome

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
        lines += [f"  declined: {reason}" for reason in self.judged.declines]
        lines += [f"  note: {note}" for note in (*self.judged.suspicions, *self.judged.remarks)]
        lines += [f"  other bits: {each.what}, by up to {each.ulps:.3g} ulp" for each in self.judged.differences]
        if self.finding:
            lines.append(f"  known: {self.finding}")
        return "\n".join(lines)


def dishonest(judged: Judged, reason: str) -> Judged:
    """Return a DISHONEST judgement with the sentence `reason` and the numbers of `judged`, without its results."""
    return Judged(Outcome.DISHONEST, (reason,), worst_ratio=judged.worst_ratio, judged=judged.judged)


def credible(judged: Judged) -> Judged:
    """Return the judgement that a worker sent. If a kernel must have changed it, because it is no `Judged`, or RIGHT with
    an error above its bound, return a DISHONEST one. Only a process without the kernel's code may call this.
    """
    if type(judged) is not Judged or type(judged.outcome) is not Outcome:
        return Judged(Outcome.DISHONEST, ("its worker sent the judge what is no verdict: the kernel is dishonest",))
    if judged.outcome is Outcome.RIGHT and not judged.worst_ratio <= 1:
        reason = (
            f"it is called right with an error of {judged.worst_ratio:.3g} times its bound: what judges it was changed"
        )
        return dishonest(judged, reason)
    return judged
