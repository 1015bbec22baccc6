"""The outcome of a case, and what a check found in it."""

import enum
from dataclasses import dataclass


class Outcome(enum.Enum):
    """The outcome of a case."""

    RIGHT = "right"
    WRONG = "wrong"
    DECLINED = "declined"
    FAILED = "failed"
    KNOWN = "known"

    def __repr__(self) -> str:
        return f"Outcome.{self.name}"


@dataclass(frozen=True)
class Judged:
    """A check's findings in one case.

    Attributes:
        outcome: RIGHT, WRONG, DECLINED (nothing could be judged), or FAILED: it raised, crashed or did not return.
        wrongs: what was wrong, a sentence each.
        declines: what was refused, a sentence each.
        worst_ratio: the largest error over its bound.
        judged: results that were held against something.
    """

    outcome: Outcome
    wrongs: tuple[str, ...] = ()
    declines: tuple[str, ...] = ()
    worst_ratio: float = 0.0
    judged: int = 0
