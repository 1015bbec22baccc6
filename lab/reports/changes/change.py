"""A change of SGLang's, the question that the lab asks of it, and what the five of them share."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.reports.changes.verdicts import Answer, Observation, compared
from lab.timing.statistics import Times

Row = Mapping[str, Any]  # of a list in a recording
RowPair = tuple[Row, Row]  # without the change and with it, at one point
Recording = Mapping[str, Any]
Recordings = Mapping[str, Recording]  # by the name of the experiment's module


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        number: of its pull request in sgl-project/sglang.
        title: what it does.
        claim: what it says, or is for; `source` says where that is from and what became of it.
        question: what the lab asks of it.
        module: the experiment of `lab.experiments` that measures it.
        judge: the answer of that experiment's recording, which is there; others may be.
        beside: experiments whose recordings say more where they are there.
    """

    number: int
    title: str
    claim: str
    source: str
    question: str
    module: str
    judge: Callable[[Recordings], Answer]
    beside: tuple[str, ...] = ()


def pairs(rows: Sequence[Row], point: Callable[[Row], Hashable], arm: str, before: str, after: str) -> list[RowPair]:
    """Return the rows of two arms at each point that has both, in the order of the first arm's rows.

    Args:
        point: of a row, what its point is.
        arm: the key of a row's arm; `before` and `after` are two of its values.
    """
    changed = {point(row): row for row in rows if row[arm] == after}
    return [(row, changed[point(row)]) for row in rows if row[arm] == before and point(row) in changed]


def compared_rows(group: str, where: str, rows: RowPair) -> Observation:
    """Compare the times of two rows that one clock took."""
    return compared(group, where, {"": (Times.of_row(rows[0]), Times.of_row(rows[1]))})


def compared_loops(group: str, where: str, rows: RowPair, what: str) -> Observation:
    """Compare two loops by two clocks: `<what>_us` of each profiled turn, and `unprofiled_<what>_us` by the host's clock."""
    profiled = [Times.of([turn[f"{what}_us"] for run in row["runs"] for turn in run]) for row in rows]
    unprofiled = [Times.of(row[f"unprofiled_{what}_us"]) for row in rows]
    clocks = {"in the profile": (profiled[0], profiled[1]), "without it": (unprofiled[0], unprofiled[1])}
    return compared(group, where, clocks)
