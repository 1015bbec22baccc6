"""Arms: different ways to do the same work, which take turns at a point. Those that decline it, and those that are wrong."""

from collections.abc import Callable, Mapping
from dataclasses import replace
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
