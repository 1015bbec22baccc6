"""Arms: different ways to do the same work, which take turns at a point. Those that decline it, and those that are wrong."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from lab.timing.work import Check, GpuWork

Works = Mapping[str, GpuWork]
Time = TypeVar("Time")  # such as GpuTime or HostTime


class PointFailedError(Exception):
    """A point could not be measured, and not because a kernel declines it; the message names it."""


class WrongArmError(AssertionError):
    """An arm's results are wrong; the message says how."""

    def __init__(self, arm: str, message: str) -> None:
        super().__init__(message)
        self.arm = arm


@contextmanager
def named_in_failures(point: str) -> Iterator[None]:
    """What fails inside is a `PointFailedError` that names the point."""
    try:
        yield
    except (AssertionError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise PointFailedError(f"{point}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Outcome:
    """Rows of a point's arms that have a time, and of those that have none, with the reason."""

    rows: Sequence[dict[str, Any]] = ()
    declined: Sequence[dict[str, Any]] = ()
    wrong: Sequence[dict[str, Any]] = ()

    def by_list(self, rows: str = "rows") -> dict[str, Sequence[dict[str, Any]]]:
        """What a recording adds to its lists; `rows` names the one of the times."""
        return {rows: self.rows, "declined": self.declined, "wrong": self.wrong}


def reason_rows(point: Mapping[str, Any], reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """What every row says of its point, with each arm that has no time and why."""
    return [{**point, "arm": name, "reason": reason} for name, reason in reasons.items()]


def declined_by(works: Works) -> dict[str, str]:
    """The reasons of those that refuse their first call with NotImplementedError."""
    reasons = {}
    for name, work in works.items():
        try:
            work.call()()
        except NotImplementedError as error:
            reasons[name] = str(error)
    return reasons


def measure_right_ones(
    works: Works, measure: Callable[[Works], dict[str, Time]]
) -> tuple[dict[str, Time], dict[str, str]]:
    """Times of the arms whose results are right whenever they are checked, and what is wrong with the others.

    Args:
        works: by arm.
        measure: checks every work before and after it is timed. When one is wrong, the others are measured anew without it.
    """
    right = {name: work if work.check is None else _blaming(name, work, work.check) for name, work in works.items()}
    wrong: dict[str, str] = {}
    while right:
        try:
            return measure(right), wrong
        except WrongArmError as error:
            wrong[error.arm] = str(error)
            del right[error.arm]
    return {}, wrong


def _blaming(arm: str, work: GpuWork, check: Check) -> GpuWork:
    return replace(work, check=partial(_check_of, arm, check))


def _check_of(arm: str, check: Check, arguments: Mapping[str, Any]) -> None:
    try:
        check(arguments)
    except AssertionError as error:
        raise WrongArmError(arm, str(error)) from error
