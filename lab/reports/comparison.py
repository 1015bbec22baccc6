"""Two sides of recorded runs, row by row: paired, refused where they are no comparison, and compared by the lab's one rule."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from typing import Any

from lab.exit_status import ExitStatus
from lab.reports.recorded import TIMED_BY, Identity, RecordedRun, Row, grouped
from lab.timing.method import L2
from lab.timing.roofline import why_impossible
from lab.timing.statistics import BETWEEN_RUNS, Rule, SampleComparison, Speed, compare_runs

# An NVIDIA GPU moves its SM clock in steps of 15 MHz, 0.8 % of 1980: a few steps are no other state, a power cap is.
CLOCK_TOLERANCE_PERCENT = 3.0
# Of `lab.provenance.environment`: facts that must agree for times to be comparable.
MUST_AGREE = {
    "GPU": ("gpu",),
    "power limit": ("nvidia_smi", "power.limit"),
    "maximum SM clock": ("nvidia_smi", "clocks.max.sm"),
}
# Rows of one name with other numbers here did other work.
WORK = ("requests", "query_tokens", "kv_tokens", "bytes_moved", "operations")
# What changed comes first, what stayed as it was comes last; None is a row that was refused.
CHANGED_FIRST = (Speed.SLOWER, Speed.FASTER, Speed.UNSURE, None, Speed.SAME)

Side = Mapping[Identity, Sequence[Row]]  # rows of GPU time by what they measure, one row per repeated run


class NotComparableError(ValueError):
    """Two recordings that must not be compared; the message names what differs, on both sides."""


@dataclass(frozen=True)
class RowComparison:
    """One pair of rows: compared, or refused with a reason; exactly one of the two."""

    identity: Identity
    samples: SampleComparison | None = None
    refused: str = ""


@dataclass(frozen=True)
class RunComparison:
    """All rows of two sides.

    Attributes:
        rows: pairs, those that changed first.
        missing, added: what only the first or only the second side has.
        missing_counts: whether a missing row is a regression.
    """

    before: str
    after: str
    rows: tuple[RowComparison, ...]
    missing: tuple[Identity, ...]
    added: tuple[Identity, ...]
    missing_counts: bool = True

    @property
    def compared(self) -> tuple[SampleComparison, ...]:
        return tuple(row.samples for row in self.rows if row.samples is not None)

    @property
    def refused(self) -> tuple[RowComparison, ...]:
        return tuple(row for row in self.rows if row.refused)

    def exit_status(self, strict: bool = False) -> ExitStatus:
        """Return the exit status of `lab.reports.compare`."""
        changes = {samples.speed for samples in self.compared}
        if not changes:
            return ExitStatus.NOT_JUDGED
        trips = {Speed.SLOWER, Speed.UNSURE} if strict else {Speed.SLOWER}
        if changes & trips or (self.missing and self.missing_counts):
            return ExitStatus.WRONG
        return ExitStatus.NOT_JUDGED if self.refused else ExitStatus.DONE


def compare_recorded(
    before: Sequence[RecordedRun], after: Sequence[RecordedRun], rule: Rule = BETWEEN_RUNS
) -> RunComparison:
    """Compare the runs of two sides, one run or repeated ones on each.

    Raises:
        NotComparableError: the runs are of different GPUs, power limits or maximum clocks, or of no GPU that they name.
    """
    _refuse_other_machines([*before, *after])
    first, second = (", ".join(str(run.path) for run in runs) for runs in (before, after))
    return RunComparison(first, second, *_compare_sides(_side(before), _side(after), rule))


def compare_within(run: RecordedRun, key: str, before: str, after: str, rule: Rule = BETWEEN_RUNS) -> RunComparison:
    """Compare the rows of one run whose fact `key` is `before` with those where it is `after` and all else is equal.

    Raises:
        NotComparableError: `key` is how the time was taken, or no row has such a value.
    """
    if before == after:
        raise NotComparableError(f"both sides are {key} {before}: there is nothing to compare")
    if key in (*TIMED_BY, "method"):
        raise NotComparableError(f"two values of {key} are two methods, and those are not compared: {before}, {after}")
    _refuse_other_machines([run])
    sides = _side_where(run, key, before), _side_where(run, key, after)
    return RunComparison(f"{key} {before}", f"{key} {after}", *_compare_sides(*sides, rule), missing_counts=False)


def _side(runs: Sequence[RecordedRun]) -> Side:
    return grouped((row.identity, row) for run in runs for row in run.gpu_rows)


def _side_where(run: RecordedRun, key: str, value: str) -> Side:
    chosen = [row for row in run.gpu_rows if str(row.facts.get(key)) == value]
    if not chosen:
        there = sorted({str(row.facts[key]) for row in run.gpu_rows if key in row.facts})
        facts = sorted({fact for row in run.gpu_rows for fact in row.facts})
        known = f"there is {', '.join(there)}" if there else f"{key} is none of their facts: {', '.join(facts)}"
        raise NotComparableError(f"{run.path}: no row of GPU time has {key} {value}; {known}")
    return {tuple(item for item in row.identity if item[0] != key): [row] for row in chosen}


def _compare_sides(
    before: Side, after: Side, rule: Rule
) -> tuple[tuple[RowComparison, ...], tuple[Identity, ...], tuple[Identity, ...]]:
    """Return the pairs of rows, and what only `before` and only `after` has."""
    rows: list[RowComparison] = []
    missing: list[Identity] = []
    met: set[Identity] = set()
    # A row that exists by another method only is refused, with its name: that is more than a missing row.
    by_another_method = {_apart_from_method(each): each for each in after if each not in before}
    for identity, mine in before.items():
        other = identity if identity in after else by_another_method.get(_apart_from_method(identity))
        if other is None:
            missing.append(identity)
            continue
        met.add(other)
        rows.append(_compare_rows(identity, mine, after[other], rule))
    rows.sort(key=lambda row: CHANGED_FIRST.index(row.samples.speed if row.samples else None))
    return tuple(rows), tuple(missing), tuple(identity for identity in after if identity not in met)


def _compare_rows(identity: Identity, mine: Sequence[Row], theirs: Sequence[Row], rule: Rule) -> RowComparison:
    if refused := why_not_compared(mine, theirs):
        return RowComparison(identity, refused=refused)
    samples = compare_runs([row.samples_us for row in mine], [row.samples_us for row in theirs], rule)
    return RowComparison(identity, _doubted(samples, mine, theirs))


def _apart_from_method(identity: Identity) -> Identity:
    return tuple(item for item in identity if item[0] not in TIMED_BY)


def limits_of(rows: Sequence[Row]) -> str:
    """Return what held the GPU back in these rows, in words; "" if nothing was seen to."""
    return ", ".join(sorted({reason for row in rows for reason in row.throttled_by}))


def _doubted(samples: SampleComparison, before: Sequence[Row], after: Sequence[Row]) -> SampleComparison:
    """Make a verdict UNSURE that a limit may have made. A limit only makes a side slower, so the other direction stands."""
    limits = {"before": limits_of(before), "after": limits_of(after)}
    limited = any(limits.values())
    doubted = {
        Speed.SLOWER: bool(limits["after"]),
        Speed.FASTER: bool(limits["before"]),
        Speed.SAME: limited
        and any(any(_clock_differences(one, other, "sm_clock_mhz", "SM")) for one in before for other in after),
        Speed.UNSURE: False,
    }
    if not doubted[samples.speed]:
        return samples
    limits_of_sides = " and ".join(f"{side} by the {reasons}" for side, reasons in limits.items() if reasons)
    return replace(samples, speed=Speed.UNSURE, reason=f"the GPU was held back {limits_of_sides}")


def why_not_compared(before: Sequence[Row], after: Sequence[Row]) -> str:
    """Return why times of these rows must not be compared, naming both values; "" if they may be."""
    for side, rows in (("before", before), ("after", after)):
        if why := next(filter(None, map(_why_impossible, rows)), ""):
            return f"the time {side} is refused: {why}"
    first, *others = (*before, *after)
    limited = bool(limits_of([first, *others]))
    return next((reason for row in others for reason in _differences(first, row, limited)), "")


def _why_impossible(row: Row) -> str:
    """Return why the GPU of a row cannot do its work in its time; "" where it can, or where the row does not tell."""
    facts = row.facts
    if facts.get("bandwidth_percent") is None or facts.get("matrix_rate_percent") is None:
        return ""
    is_cold = facts.get("l2") != L2.WARM.value
    kv_dtype = str(facts.get("kv_dtype", ""))
    return why_impossible(facts["bandwidth_percent"], facts["matrix_rate_percent"], is_cold=is_cold, kv_dtype=kv_dtype)


def _differences(first: Row, other: Row, limited: bool) -> Iterator[str]:
    """Name each difference. An SM clock that a limit moved is the limit's, and `_doubted` sees to it."""
    for what, mine, theirs in (
        ("methods", first.timed_by, other.timed_by),
        ("methods", first.facts.get("method"), other.facts.get("method")),
        *((f"workloads, {key}", first.facts.get(key), other.facts.get(key)) for key in WORK),
    ):
        if mine != theirs:
            yield f"two {what}: {mine} and {theirs}"
    yield from _clock_differences(first, other, "memory_clock_mhz", "memory")
    if not limited:
        yield from _clock_differences(first, other, "sm_clock_mhz", "SM")


def _clock_differences(first: Row, other: Row, key: str, clock: str) -> Iterator[str]:
    """Name two ranges of clocks if an end differs: a range that reaches lower was, for some samples, another state."""
    mine, theirs = _ends(first.facts.get(key)), _ends(other.facts.get(key))
    agree = partial(isclose, rel_tol=CLOCK_TOLERANCE_PERCENT / 100)
    if len(mine) != len(theirs) or not all(map(agree, mine, theirs)):
        yield f"two {clock} clocks: {_mhz(mine)} and {_mhz(theirs)}"


def _ends(clock_mhz: Any) -> tuple[float, ...]:
    """Return the ends of a recorded range of clocks; one clock is a range of itself, and None has no ends."""
    if clock_mhz is None:
        return ()
    return tuple(clock_mhz) if isinstance(clock_mhz, Sequence) else (clock_mhz, clock_mhz)


def _mhz(ends: tuple[float, ...]) -> str:
    if not ends:
        return "not recorded"
    return f"{ends[0]:g} MHz" if ends[0] == ends[-1] else f"{ends[0]:g} to {ends[-1]:g} MHz"


def _refuse_other_machines(runs: Sequence[RecordedRun]) -> None:
    first = runs[0]
    for run in runs:
        if not run.fact("gpu"):
            raise NotComparableError(f"{run.path} names no GPU, and a time without one is not compared")
        for name, where in MUST_AGREE.items():
            mine, other = first.fact(*where), run.fact(*where)
            if mine != other:
                raise NotComparableError(f"another {name}: {mine} in {first.path}, {other} in {run.path}")
