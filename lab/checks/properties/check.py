"""A check of the catalogue as data."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.checks.case_run import CaseRun
from lab.checks.parameters.attention import balanced
from lab.named_enum import NamedEnum
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import ATTENTION, Interface

if TYPE_CHECKING:
    from lab.checks.report import CaseVerdict


class Level(NamedEnum):
    """The level of a run: the number of cases."""

    SMOKE = "smoke"
    FULL = "full"


Cases = Callable[[Interface, Ranges, Level], Iterable[Any]]
# Cases that follow from the verdicts so far.
Following = Callable[[Interface, Ranges, "Sequence[CaseVerdict]"], Iterable[Any]]


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
        adapt: what makes a drawn case one of this check's; None: no case is drawn.
        draw: what yields random cases without an end, of what the verdicts say that the implementation takes; None: nothing.
        shrink: what makes a wrong one of these small, called with the ranges, the case, and a function that says whether
            another is wrong too.
        more: rounds of the full level, in turn, each of which follows from the verdicts of all before it. They follow the smoke
            level's cases, and come to those of the full level where the implementation declines nothing.
    """

    key: str
    name: str
    catches: str
    cases: Cases
    judge: Callable[[CaseRun], None]
    interfaces: tuple[Interface, ...] = ATTENTION
    adapt: Callable[[Any], Any] | None = None
    more: tuple[Following, ...] = ()
    draw: Following | None = None
    shrink: Callable[[Ranges, Any, Callable[[Any], bool]], Any] | None = None


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


def same(case: Any) -> Any:
    """Return a drawn case as it is."""
    return case
