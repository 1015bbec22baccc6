"""Make a failing case smaller while it still fails."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Subject = TypeVar("Subject")


def smallest(
    subject: Subject,
    reductions: Sequence[Callable[[Subject], Iterable[Subject]]],
    stays_wrong: Callable[[Subject], bool],
) -> Subject:
    """Replace a failing subject by reduced ones as long as one of them still fails (`stays_wrong`). Return the last one."""
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
