"""The outcome of a case, a check's findings in it, and the verdict on it."""

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
    """The conclusion about a case, such as RIGHT, WRONG or DECLINED."""

    RIGHT = "right"
    WRONG = "wrong"
    DECLINED = "declined"  # nothing could be judged
    FAILED = "failed"  # it raised, crashed or did not return
    KNOWN = "known"  # wrong as a known failure says
    DISHONEST = "dishonest"  # it changed what judges it


class TooLate(Exception):  # noqa: N818 - nothing is wrong
    """The case was not begun, because the run was over."""


# Identifies a verdict of a report: the check, the reprs of function, case and ranges, and whether the case was drawn.
Key = tuple[str, str, str, str, bool]
BROKEN = (Outcome.WRONG, Outcome.FAILED, Outcome.DISHONEST)


@dataclass(frozen=True)
class WrongVector:
    """One wrong vector of a result: its row and head, and the elements of both vectors with the largest errors."""

    where: str
    expected: tuple[float, ...]
    got: tuple[float, ...]


@dataclass(frozen=True)
class BitDifference:
    """A call whose output has other bits than that of a base call. `ulps` is the largest difference, in units of the last place
    of its vector's largest element; infinity if an element is not finite.
    """

    what: str  # how the call differs from the base call
    ulps: float


# Names of a result that its check has not named, and of what a call returned.
IT_FAILED, RETURNED = "it failed", "what it returned"


@dataclass(frozen=True)
class CheckedResult:
    """One comparison in a case, such as the output of a call with the expected output."""

    name: str  # of the call, within its check
    held: str  # what it is compared with, a key of `lab.checks.explain.diagnosis.HELD`
    features: Features = field(hash=False)  # of the case and the call
    wrong: bool
    # Each request's features, and whether its rows are wrong; empty where only all rows were compared.
    requests: tuple[tuple[Features, bool], ...] = field(default=(), hash=False)
    example: WrongVector | None = None  # the worst


@dataclass(frozen=True)
class SavedOutput:
    """An output tensor as dtype, shape and bytes. A process that reads it runs no code of the process that saved it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, out: Tensor) -> "SavedOutput":
        plain = out.detach().cpu().contiguous()
        return cls(out.dtype, tuple(out.shape), plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")

    def tensor(self) -> Tensor:
        """Return the saved output as a tensor on the CPU."""
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Judged:
    """What a check found in one case: the outcome, sentences about errors and refusals, and the compared results."""

    outcome: Outcome
    wrongs: tuple[str, ...] = ()  # a sentence each
    declines: tuple[str, ...] = ()  # what was refused, a sentence each
    worst_ratio: float = 0.0  # the largest error over its bound
    judged: int = 0  # results that were compared with something
    results: tuple[CheckedResult, ...] = ()
    # The first output, of cases that may be audited.
    output: SavedOutput | None = field(default=None, repr=False, compare=False)
    remarks: tuple[str, ...] = ()  # what a reader should know besides, a sentence each
    by_lab: bool = False  # nothing could be judged because of the lab or this machine, and not of the implementation
    suspicions: tuple[str, ...] = ()  # about the case's inputs, a sentence each
    differences: tuple[BitDifference, ...] = ()  # of a case of `lab.checks.invariance`

    def __post_init__(self) -> None:
        for name in ("wrongs", "declines", "remarks", "suspicions"):  # they quote messages of the kernel
            object.__setattr__(self, name, tuple(map(printable, getattr(self, name))))


@dataclass(frozen=True)
class CaseVerdict:
    """The judge's verdict on one case."""

    implementation: str  #: its name
    check: str  #: its key
    interface: Interface  #: the judged function
    case: Any
    device: str
    judged: Judged  #: what the check found
    ranges: Ranges = field(default_factory=Ranges)  #: the parameter values within which the check varied the case
    drawn: bool = False  #: the case is random. If it is wrong, it is the smallest wrong case that was found.
    finding: str = ""  #: for a KNOWN case, the page and heading that describe the failure
    #: number of the case in its report, from 1; 0: in no report yet. A run that continues an older report keeps its numbers.
    number: int = 0
    recorded_in: str = ""  #: path of the report's file; "" if the verdict is in none
    #: names of the profiles (`lab.checks.parameters.profiles`) of the engines that send what the verdict is about
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
        """Return the sentences about errors, joined; if there are none, those about refusals."""
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
    """Return the outcome DISHONEST, with a reason instead of sentences and results, for a kernel that changed the judge."""
    return Judged(Outcome.DISHONEST, (reason,), worst_ratio=judged.worst_ratio, judged=judged.judged)


def credible(judged: Judged) -> Judged:
    """Return a worker's findings, as DISHONEST if they are no `Judged`, or are RIGHT with an error above its bound.

    Call this in a process without the kernel's code.
    """
    if type(judged) is not Judged or type(judged.outcome) is not Outcome:
        return Judged(Outcome.DISHONEST, ("its worker sent the judge what is no verdict: the kernel is dishonest",))
    if judged.outcome is Outcome.RIGHT and not judged.worst_ratio <= 1:
        reason = (
            f"it is called right with an error of {judged.worst_ratio:.3g} times its bound: what judges it was changed"
        )
        return dishonest(judged, reason)
    return judged
