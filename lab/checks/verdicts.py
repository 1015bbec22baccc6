"""The outcome of a case, and what a check found in it."""

from dataclasses import dataclass

from lab.named_enum import NamedEnum


class Outcome(NamedEnum):
    """The outcome of a case."""

    RIGHT = "right"
    WRONG = "wrong"
    DECLINED = "declined"
    FAILED = "failed"
    KNOWN = "known"


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
