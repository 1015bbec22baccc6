"""What recorded numbers say of a statement: at each measured point it holds, it does not, or that cannot be told.

Two times differ where the ranges between their quartiles lie apart, and the medians by a least effect. Where only a median and
an interquartile range are recorded, the quartiles are taken to be half of it away. Where two clocks timed the same, a statement
holds if both say so, and does not if one contradicts it and the other does not confirm it: a profile slows the host down and is
not believed alone.
"""

import enum
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.timing.gpu_time import interquartile_range

# Of the time without the change. Less than lab.timing.statistics's, which compares runs: here arms take turns within one.
LEAST_EFFECT_PERCENT = 1.0


class Standing(enum.Enum):
    """What a point says of a statement; the value is how a text says it."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "cannot be told"

    def __repr__(self) -> str:
        return f"Standing.{self.name}"


@dataclass(frozen=True)
class Timing:
    """A time in µs: its median, and the distance of its quartiles, 0 where that was not recorded."""

    median_us: float
    iqr_us: float = 0.0

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> "Timing":
        return cls(statistics.median(samples_us), interquartile_range(samples_us))


@dataclass(frozen=True)
class Comparison:
    """One clock's times without a change and with it."""

    before: Timing
    after: Timing

    @property
    def saved_us(self) -> float:
        return self.before.median_us - self.after.median_us

    def standing(self, least_saved_us: float = 0.0) -> Standing:
        """Whether more than `least_saved_us` is saved."""
        beyond = self.saved_us - least_saved_us
        apart = (self.before.iqr_us + self.after.iqr_us) / 2
        if abs(beyond) <= max(apart, LEAST_EFFECT_PERCENT / 100 * self.before.median_us):
            return Standing.UNDECIDED
        return Standing.HOLDS if beyond > 0 else Standing.FAILS


@dataclass(frozen=True)
class Observation:
    """What one point says of a statement.

    Attributes:
        group: what the points of one line of a table have in common.
        where: the point.
        standing: what it says.
        figures: the numbers behind it.
        saved_us, ratio: time without the change less time with it, and over it; None where no times are compared.
    """

    group: str
    where: str
    standing: Standing
    figures: str
    saved_us: float | None = None
    ratio: float | None = None


def compared(group: str, where: str, clocks: Mapping[str, Comparison], *, least_saved_us: float = 0.0) -> Observation:
    """What times say of the statement that more than `least_saved_us` is saved.

    Args:
        clocks: by name ("" for the only one); the first one's times are the figures of the tables.
    """
    said = {clock.standing(least_saved_us) for clock in clocks.values()}
    if said == {Standing.HOLDS}:
        standing = Standing.HOLDS
    else:
        standing = Standing.FAILS if Standing.FAILS in said and Standing.HOLDS not in said else Standing.UNDECIDED
    first = next(iter(clocks.values()))
    figures = ", ".join(f"{_arrow(clock)}{' ' if name else ''}{name}" for name, clock in clocks.items())
    ratio = first.before.median_us / first.after.median_us
    return Observation(group, where, standing, figures, first.saved_us, ratio)


def stated(group: str, where: str, holds: bool, figures: str) -> Observation:
    """What a recorded fact says that is no time."""
    return Observation(group, where, Standing.HOLDS if holds else Standing.FAILS, figures)


def _arrow(clock: Comparison) -> str:
    return f"{microseconds(clock.before.median_us)} → {microseconds(clock.after.median_us)} µs"


def microseconds(value: float) -> str:
    """As many digits as a comparison needs: 1,234 and 56.7 and 8.90, and 0."""
    digits = 0 if abs(value) >= 1000 or value == 0 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


@dataclass(frozen=True)
class Aspect:
    """A statement, and what was recorded about it.

    Attributes:
        statement: a sentence that a point can confirm or contradict.
        observations: of the points, in the order of the recording.
        of_claim: whether the change claims it; what it does not claim is reported and does not count in its verdict.
    """

    statement: str
    observations: tuple[Observation, ...]
    of_claim: bool = True

    def count(self, standing: Standing) -> int:
        return sum(each.standing is standing for each in self.observations)

    def that(self, standing: Standing) -> list[Observation]:
        return [each for each in self.observations if each.standing is standing]

    def by_group(self) -> dict[str, list[Observation]]:
        found: dict[str, list[Observation]] = {}
        for each in self.observations:
            found.setdefault(each.group, []).append(each)
        return found

    @property
    def verdict(self) -> str:
        """One clause: "holds at 5 of 6 points, cannot be told at 1"."""
        if not self.observations:
            return "not recorded"
        total = len(self.observations)
        counts = {standing: self.count(standing) for standing in Standing if self.count(standing)}
        if len(counts) == 1:
            (standing,) = counts
            every = "all" if standing is Standing.HOLDS else "any of"
            return f"{standing.value} at {'the one point' if total == 1 else f'{every} {total} points'}"
        first, *others = [f"{standing.value} at {count}" for standing, count in counts.items()]
        return ", ".join([f"{first} of {total} points", *others])


@dataclass(frozen=True)
class Answer:
    """What the recordings of a change say.

    Attributes:
        aspects: its statements.
        setting: what was run, from the recording.
        notes: sentences with numbers from the recording that belong beside them.
        missing: what is not in the recordings.
    """

    aspects: tuple[Aspect, ...]
    setting: str
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Of all that the change claims, in a word or two."""
        counted = [each for aspect in self.aspects if aspect.of_claim for each in aspect.observations]
        if not counted:
            return "not recorded"
        holding = sum(each.standing is Standing.HOLDS for each in counted)
        if holding:
            return Standing.HOLDS.value if holding == len(counted) else "holds in part"
        failing = any(each.standing is Standing.FAILS for each in counted)
        return (Standing.FAILS if failing else Standing.UNDECIDED).value
