"""Make a failing case smaller while it still fails."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Subject = TypeVar("Subject")


def smallest(
    subject: Subject,
    reductions: Sequence[Callable[[Subject], Iterable[Subject]]],
    stays_wrong: Callable[[Subject], bool],
) -> Subject:
    """Reduce a failing `subject`, such as a case, and return the smallest failing version that was found. A reduction yields
    smaller versions of a subject. The first version that fails (`stays_wrong`) is reduced further.
    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for reduction in reductions:
            while (found := next(filter(stays_wrong, reduction(subject)), None)) is not None:
                subject, is_smaller = found, True
    return subject


def halvings(number: int) -> Iterator[int]:
    """Yield a number, its half, its quarter and so on down to 1, rounded down: 5, 2, 1."""
    while number > 0:
        yield number
        number //= 2
