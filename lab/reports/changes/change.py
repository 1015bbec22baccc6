"""A change of SGLang's, the question that the lab asks of it, and what the five of them share."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.reports.changes.verdicts import Answer

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


def requests_in_words(count: int) -> str:
    """Return "1 request" or "8 requests"."""
    return f"{count} request{'' if count == 1 else 's'}"


def in_words(mode: str) -> str:
    """Return a mode's name without underscores."""
    return mode.replace("_", " ")
