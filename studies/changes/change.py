"""Define a change (pull request) of SGLang, and functions that the modules of all five changes use."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lab.timing.statistics import Times
from studies.changes.verdicts import Answer, Observation, compared
from studies.recording import Recorded, RecordedRow, rows_by_point

RowPair = tuple[RecordedRow, RecordedRow]  # without the change and with it, at one point
TimesByClock = Callable[[RecordedRow], dict[str, Times]]
Recordings = Mapping[str, Recorded]  # by the name of the study


@dataclass(frozen=True)
class Change:
    """One pull request of SGLang, and the study that measures its effect.

    Attributes:
        claim: the claimed effect or purpose. `source` names the text with the claim, and the state of the pull request.
        question: the question that the study answers about the change.
        module: the study that measures the change. Recordings of the studies in `further` contribute to the answer.
    """

    number: int
    title: str
    claim: str
    source: str
    question: str
    module: str
    judge: Callable[[Recordings], Answer]
    further: tuple[str, ...] = ()


def two_clocks(what: str) -> TimesByClock:
    """Return a function that reads two sets of times of a loop's recorded row: of profiled steps, and without a profile."""
    return lambda row: {
        "in the profile": Times.of([turn[f"{what}_us"] for run in row["runs"] for turn in run]),
        "without a profile": Times.of(row[f"unprofiled_{what}_us"]),
    }


def pairs(rows: Iterable[RecordedRow], variant: str, before: str, after: str, point: Sequence[str]) -> list[RowPair]:
    """Return the rows of both variants at each point that has both. The keys of a row's variant and point are `variant` and
    `point`.
    """
    found = rows_by_point(rows, point, variant).values()
    return [(variants[before], variants[after]) for variants in found if before in variants and after in variants]


def compared_pairs(
    found: Iterable[RowPair],
    named: Callable[[RecordedRow], tuple[str, str]],
    clocks: TimesByClock = lambda row: {"": Times.of_row(row)},
    least_saved_us: float = 0.0,
) -> list[Observation]:
    """Compare the times of both rows of each pair by `compared`. `named` returns the group and the name of a row's point."""
    observations = []
    for before, after in found:
        times = {clock: (taken, clocks(after)[clock]) for clock, taken in clocks(before).items()}
        observations.append(compared(*named(before), times, least_saved_us=least_saved_us))
    return observations
