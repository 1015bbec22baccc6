"""A check of the catalogue as data."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lab.checks.case_run import CaseRun
from lab.checks.parameters.attention import balanced
from lab.checks.parameters.sampling import Sample
from lab.checks.run.verdicts import CaseVerdict
from lab.named_enum import NamedEnum
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import ATTENTION, Interface


class Level(NamedEnum):
    """The level of a run: the number of cases."""

    SMOKE = "smoke"
    FULL = "full"


Cases = Callable[[Interface, Ranges, Level], Iterable[Any]]
# Cases that follow from the verdicts so far.
Following = Callable[[Interface, Ranges, Sequence[CaseVerdict]], Iterable[Any]]
Draw = Callable[[Interface, Ranges, Sequence[CaseVerdict]], Iterable[Sample]]


def nothing_drawn(*_: Any) -> Iterable[Sample]:
    """Return no sample."""
    return ()


@dataclass(frozen=True)
class Check:
    """One way of being wrong, and how it would show.

    Attributes:
        key: its number in the catalogue, such as "K4".
        name: snake_case, of its module.
        catches: what it catches, the first line of its module.
        cases: the fixed cases for an interface.
        judge: tells a run what is wrong. Raises `lab.checks.case_run.Unsupported` where nothing could be judged.
        interfaces: what it applies to.
        draw: the random cases of a level, without an end.
        draw_on: those that are judged after the level, while there is time, of what the verdicts so far say that the
            implementation takes.
        more: rounds of the full level, in turn, each of which follows from the verdicts of all before it. They follow the smoke
            level's cases, and come to those of the full level where the implementation declines nothing.
    """

    key: str
    name: str
    catches: str
    cases: Cases
    judge: Callable[[CaseRun], None]
    interfaces: tuple[Interface, ...] = ATTENTION
    draw: Draw = nothing_drawn
    more: tuple[Following, ...] = ()
    draw_on: Draw = nothing_drawn


def first_line(text: str | None) -> str:
    """Return the first line of a module's docstring: what its check catches."""
    return (text or "").split("\n", 1)[0]


def counted(level: Level, smoke: int, full: int) -> int:
    """Return the number of fixed cases of a level."""
    return smoke if level is Level.SMOKE else full


def balanced_cases(smoke: int, full: int, seed: int) -> Cases:
    """Return what yields a covering array of the ranges as they are: so many cases at each level, drawn from a seed."""
    return partial(_balanced, smoke, full, seed)


def _balanced(
    smoke: int, full: int, seed: int, interface: Interface, ranges: Ranges, level: Level
) -> Iterator[AttentionCase]:
    return balanced(ranges, interface, counted(level, smoke, full), seed=seed)
