"""Make what is wrong smaller while it stays wrong."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Subject = TypeVar("Subject")


def smallest(
    subject: Subject,
    reductions: Sequence[Callable[[Subject], Iterable[Subject]]],
    stays_wrong: Callable[[Subject], bool],
) -> Subject:
    """Return the subject that no reduction makes smaller.

    Args:
        subject: what is wrong.
        reductions: functions that return smaller subjects. The first one that stays wrong is taken, and the function is called
            with it again until none stays wrong. All functions are called again if one of them has made the subject smaller.
        stays_wrong: returns True if a smaller subject is wrong too.
    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for reduction in reductions:
            while (found := next(filter(stays_wrong, reduction(subject)), None)) is not None:
                subject, is_smaller = found, True
    return subject


def halvings(number: int) -> Iterator[int]:
    """Yield a number, its half, its quarter and so on, rounded down, to 1."""
    while number > 0:
        yield number
        number //= 2
