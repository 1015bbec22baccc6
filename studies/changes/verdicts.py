"""Verdicts of recorded numbers on a statement: at each measured point it holds, does not hold, or is undecided.

`lab.timing.statistics` has the rule for times. The statement that a change saves time holds at a point if the time with the
change is FASTER. It does not hold if the time is SLOWER, and is undecided if it is the SAME or UNSURE. If two clocks timed the
same work, the statement holds if both confirm it, and does not hold if one contradicts it and the other does not confirm it. A
profile alone is not enough, because it slows the host down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.named_enum import NamedEnum
from lab.reports.tables import grouped
from lab.timing.statistics import INTERLEAVED, Speed, Times, compare_times

NOT_RECORDED = "not recorded"


class Standing(NamedEnum):
    """The verdict on a statement at one measured point. The value is the verdict's text."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "is undecided"


BeforeAfter = tuple[Times, Times]  # one clock's times without a change and with it


def standing_of(before: Times, after: Times, least_saved_us: float = 0.0) -> Standing:
    speed = compare_times(before, after.plus(least_saved_us), INTERLEAVED).speed
    return {Speed.FASTER: Standing.HOLDS, Speed.SLOWER: Standing.FAILS}.get(speed, Standing.UNDECIDED)


@dataclass(frozen=True)
class Observation:
    """The verdict on a statement at one measured point.

    Attributes:
        group: the points of one group share a line of a table.
        figures: the numbers from which the verdict follows, as text.
        saved_us, ratio: time without the change minus the time with it, and their quotient; None if no times are compared.
    """

    group: str
    where: str
    standing: Standing
    figures: str
    saved_us: float | None = None
    ratio: float | None = None


def compared(group: str, where: str, clocks: Mapping[str, BeforeAfter], *, least_saved_us: float = 0.0) -> Observation:
    """Return whether more than `least_saved_us` is saved at a point by all `clocks`. The name of an only clock is ""."""
    said = {standing_of(*times, least_saved_us) for times in clocks.values()}
    if said == {Standing.HOLDS}:
        standing = Standing.HOLDS
    else:
        standing = Standing.FAILS if Standing.FAILS in said and Standing.HOLDS not in said else Standing.UNDECIDED
    before_us, after_us = (times.median_us for times in next(iter(clocks.values())))
    figures = ", ".join(
        f"{microseconds(before.median_us)} → {microseconds(after.median_us)} µs{' ' if name else ''}{name}"
        for name, (before, after) in clocks.items()
    )
    return Observation(group, where, standing, figures, before_us - after_us, before_us / after_us)


def stated(group: str, where: str, holds: bool, figures: str) -> Observation:
    """Return an observation about a recorded fact that is not a time."""
    return Observation(group, where, Standing.HOLDS if holds else Standing.FAILS, figures)


def microseconds(value: float) -> str:
    """Format a time with the digits that a comparison needs, as in "1,234", "56.7", "8.90" and "0"."""
    digits = 0 if abs(value) >= 1000 or value == 0 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


@dataclass(frozen=True)
class Aspect:
    """A statement about a change, with its observations. Only claimed statements count in the verdict on the change."""

    statement: str
    observations: tuple[Observation, ...]
    of_claim: bool = True

    def count(self, standing: Standing) -> int:
        return len(self.that(standing))

    def that(self, standing: Standing) -> list[Observation]:
        return [each for each in self.observations if each.standing is standing]

    def by_group(self) -> dict[str, list[Observation]]:
        return grouped((each.group, each) for each in self.observations)

    @property
    def verdict(self) -> str:
        """Return one clause: "holds at 5 of 6 points, is undecided at 1"."""
        if not self.observations:
            return NOT_RECORDED
        total = len(self.observations)
        counts = {standing: count for standing in Standing if (count := self.count(standing))}
        if len(counts) == 1:
            (standing,) = counts
            every = "any of" if standing is Standing.FAILS else "all"
            return f"{standing.value} at {'the one point' if total == 1 else f'{every} {total} points'}"
        first, *others = [f"{standing.value} at {count}" for standing, count in counts.items()]
        return ", ".join([f"{first} of {total} points", *others])


def aspects(
    claimed: Mapping[str, Sequence[Observation]], aside: Mapping[str, Sequence[Observation]] | None = None
) -> tuple[Aspect, ...]:
    listed = [Aspect(statement, tuple(found)) for statement, found in claimed.items()]
    return (*listed, *(Aspect(statement, tuple(found), of_claim=False) for statement, found in (aside or {}).items()))


@dataclass(frozen=True)
class Answer:
    """The answer about a change: the verdicts, sentences with further numbers, and what the recordings lack."""

    aspects: tuple[Aspect, ...]
    setting: str
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def claimed(self) -> list[Observation]:
        return [each for aspect in self.aspects if aspect.of_claim for each in aspect.observations]

    @property
    def verdict(self) -> str:
        said = {each.standing for each in self.claimed}
        if not said:
            return NOT_RECORDED
        if Standing.HOLDS in said:
            return Standing.HOLDS.value if len(said) == 1 else "holds in part"
        return (Standing.FAILS if Standing.FAILS in said else Standing.UNDECIDED).value
