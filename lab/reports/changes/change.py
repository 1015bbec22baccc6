"""A change of SGLang's, what it is asked, and the words that all of them share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lab.reports.changes.verdicts import Answer

Row = Mapping[str, Any]  # of a list in a recording
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


def requests_in_words(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def in_words(mode: str) -> str:
    return mode.replace("_", " ")
