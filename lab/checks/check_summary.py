"""The verdicts of one check of one function as a row of a report."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.checks.run.verdicts import Outcome
from lab.workloads.interfaces import Interface

if TYPE_CHECKING:
    from lab.checks.report import CaseVerdict

SHOWN_DECLINES = 5
WORST_FIRST = (Outcome.DISHONEST, Outcome.WRONG, Outcome.FAILED, Outcome.KNOWN, Outcome.RIGHT, Outcome.DECLINED)


@dataclass(frozen=True)
class CheckSummary:
    """One check of one function.

    Attributes:
        counts: cases by outcome.
        judged: results that were held against something.
        worst: of the cases with the row's outcome, the one with the largest error over its bound.
        declines: distinct refusals, the most frequent first.
    """

    check: str
    interface: Interface
    counts: dict[Outcome, int]
    judged: int
    worst: "CaseVerdict"
    declines: tuple[str, ...]

    @property
    def outcome(self) -> Outcome:
        """The worst that any case had: a wrong result says more of a kernel than a call that failed."""
        return next(outcome for outcome in WORST_FIRST if self.counts.get(outcome))

    @property
    def verdict(self) -> str:
        """Return the outcome; where cases are wrong and others failed, how many of each."""
        wrong, failed = self.counts.get(Outcome.WRONG, 0), self.counts.get(Outcome.FAILED, 0)
        return f"{wrong} wrong {failed} failed" if wrong and failed else self.outcome.value


def row_of(check: str, interface: Interface, verdicts: Sequence["CaseVerdict"]) -> CheckSummary:
    """Return the row of the verdicts of one check of one function."""
    worst = max(verdicts, key=lambda verdict: (-WORST_FIRST.index(verdict.outcome), verdict.judged.worst_ratio))
    declines = Counter(reason for verdict in verdicts for reason in verdict.judged.declines)
    return CheckSummary(
        check=check,
        interface=interface,
        counts=dict(Counter(verdict.outcome for verdict in verdicts)),
        judged=sum(verdict.judged.judged for verdict in verdicts),
        worst=worst,
        declines=tuple(reason for reason, _ in declines.most_common(SHOWN_DECLINES)),
    )
