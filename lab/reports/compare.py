"""Compare recorded runs, or two implementations or settings within one: a table, and an exit status for a gate.

    python -m lab.reports.compare BEFORE.json AFTER.json
    python -m lab.reports.compare BEFORE_RUNS/ AFTER_RUNS/
    python -m lab.reports.compare RUN.json --by implementation lab.kernels.portable lab.kernels.trtllm

A folder holds repeated runs of one side. Rows are paired by scenario, implementation, page size, dtypes, clock and L2. Driver,
versions and commit may differ: they are what is compared. Refused are another GPU, power limit or maximum clock (nothing
is compared then), and row by row another method, other work or other clocks. Where a limit held the GPU back, such as its
power, what the limit may have made is UNSURE: SLOWER if it held AFTER back, FASTER if BEFORE, SAME if the SM clocks differ.

Exit status, the first that holds:
    2  nothing was compared: unreadable, refused as a whole, or no pair of rows left
    1  a row is SLOWER; or AFTER lacks a row that BEFORE has; or, with --strict, a row is UNSURE
    2  a row was refused
    0  otherwise

So 1 stands beside refused rows: what was seen to be slower stays slower. Within one run (--by) a row that only one
side has is listed and does not count, because an implementation may decline a case.

pytest-benchmark's own `--benchmark-compare --benchmark-compare-fail=median:5%` works on the same rows and exits with 1; it
looks at the medians alone, and refuses nothing.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.reports.recorded import TIMED_BY, Identity, RecordedRun, RecordedRunError, Row, in_words, read_runs
from lab.timing.statistics import (
    MINIMUM_EFFECT_PERCENT,
    SIGNIFICANCE,
    SampleComparison,
    Speed,
    compare_runs,
    geometric_mean,
)

if TYPE_CHECKING:
    from rich.table import Table

# An NVIDIA GPU moves its SM clock in steps of 15 MHz, 0.8 % of 1980: a few steps are no other state, a power cap is.
CLOCK_TOLERANCE_PERCENT = 3.0
# Of `lab.provenance.environment`: what must agree for times to be comparable, and what is shown because it may not.
NVIDIA_SMI = "nvidia_smi"
MUST_AGREE = {
    "GPU": ("gpu",),
    "power limit": (NVIDIA_SMI, "power.limit"),
    "maximum SM clock": (NVIDIA_SMI, "clocks.max.sm"),
}
SHOWN = {
    "GPU": ("gpu",),
    "commit": ("commit",),
    "driver": (NVIDIA_SMI, "driver_version"),
    "CUDA": ("cuda",),
    "Python": ("python",),
}
# Rows of one name with other numbers here did other work.
WORK = ("requests", "query_tokens", "kv_tokens", "bytes_moved", "operations")
# Where the output is not a terminal nothing says how wide it may be; a row fits in this.
WIDTH_WITHOUT_TERMINAL = 160
STYLES = {Speed.FASTER: "green", Speed.SLOWER: "red", Speed.SAME: "dim", Speed.UNSURE: "yellow"}


class NotComparableError(ValueError):
    """Two recordings that must not be compared; the message names what differs, on both sides."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: rows of GPU time by what they measure, one row per repeated run."""

    name: str
    rows: Mapping[Identity, tuple[Row, ...]]


@dataclass(frozen=True)
class RowComparison:
    """One pair of rows: compared, or refused with a reason; exactly one of the two."""

    identity: Identity
    samples: SampleComparison | None = None
    refused: str = ""


@dataclass(frozen=True)
class Comparison:
    """All rows of two sides.

    Attributes:
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

    def exit_status(self, strict: bool = False) -> int:
        """See the module."""
        changes = {samples.speed for samples in self.compared}
        if not changes:
            return 2
        trips = {Speed.SLOWER, Speed.UNSURE} if strict else {Speed.SLOWER}
        if changes & trips or (self.missing and self.missing_counts):
            return 1
        return 2 if self.refused else 0


def compare_recorded(
    before: Sequence[RecordedRun],
    after: Sequence[RecordedRun],
    minimum_effect_percent: float = MINIMUM_EFFECT_PERCENT,
    significance: float = SIGNIFICANCE,
) -> Comparison:
    """Compare the runs of two sides, one run or repeated ones on each.

    Raises:
        NotComparableError: the runs are of different GPUs, power limits or maximum clocks, or of no GPU that they name.
    """
    _refuse_other_machines([*before, *after])
    sides = [Side(", ".join(str(run.path) for run in runs), _rows(runs)) for runs in (before, after)]
    return _compare_sides(sides[0], sides[1], minimum_effect_percent, significance, missing_counts=True)


def compare_within(
    run: RecordedRun,
    key: str,
    before: str,
    after: str,
    minimum_effect_percent: float = MINIMUM_EFFECT_PERCENT,
    significance: float = SIGNIFICANCE,
) -> Comparison:
    """Compare the rows of one run whose fact `key` is `before` with those where it is `after`, all else alike.

    Raises:
        NotComparableError: `key` is how the time was taken, or no row has such a value.
    """
    if before == after:
        raise NotComparableError(f"both sides are {key} {before}: that says nothing")
    if key in (*TIMED_BY, "method"):
        raise NotComparableError(f"two values of {key} are two methods, and those are not compared: {before}, {after}")
    _refuse_other_machines([run])
    sides = [Side(f"{key} {value}", _rows_where(run, key, value)) for value in (before, after)]
    return _compare_sides(sides[0], sides[1], minimum_effect_percent, significance, missing_counts=False)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.after is None) == (options.by is None):
        parser.error("compare BEFORE with AFTER, or within BEFORE --by KEY and two of its values")
    thresholds = options.minimum_effect_percent, options.significance
    try:
        if options.after and Path(options.before).resolve() == Path(options.after).resolve():
            raise NotComparableError(f"both sides are {options.before}: that says nothing")
        before = read_runs(options.before)
        after = read_runs(options.after) if options.after else before
        if options.by:
            key, *values = options.by
            comparison = compare_within(_only(before), key, values[0], values[1], *thresholds)
        else:
            comparison = compare_recorded(before, after, *thresholds)
    except (RecordedRunError, NotComparableError) as error:
        print(f"not compared: {error}", file=sys.stderr)
        return 2
    effect, significance = thresholds
    print(f"minimum effect {effect:g} %, significance {significance:g}, intervals of {100 * (1 - significance):g} %")
    _print(comparison, before, after)
    return comparison.exit_status(options.strict)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lab.reports.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", metavar="BEFORE", help="a recorded run, or a folder of repeated ones")
    parser.add_argument("after", metavar="AFTER", nargs="?", help="the same of the other side")
    parser.add_argument(
        "--by", nargs=3, metavar=("KEY", "BEFORE", "AFTER"), help="two values of one recorded fact, within one run"
    )
    parser.add_argument(
        "--minimum-effect-percent",
        type=_bounded(0, 1000),
        default=MINIMUM_EFFECT_PERCENT,
        help="a smaller change is none (default %(default)s)",
    )
    parser.add_argument(
        "--significance",
        type=_bounded(1e-6, 0.5),
        default=SIGNIFICANCE,
        help="of the rank test and the interval (default %(default)s)",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 on an UNSURE row too")
    return parser


def _bounded(least: float, most: float) -> Any:
    def number(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least:g} and {most:g}")
        return value

    return number


def _only(runs: Sequence[RecordedRun]) -> RecordedRun:
    if len(runs) > 1:
        raise NotComparableError(f"--by compares within one run, and there are {len(runs)}")
    return runs[0]


def _rows(runs: Sequence[RecordedRun]) -> dict[Identity, tuple[Row, ...]]:
    rows: dict[Identity, tuple[Row, ...]] = {}
    for run in runs:
        for row in run.gpu_rows:
            rows[row.identity] = (*rows.get(row.identity, ()), row)
    return rows


def _rows_where(run: RecordedRun, key: str, value: str) -> dict[Identity, tuple[Row, ...]]:
    chosen = [row for row in run.gpu_rows if str(row.facts.get(key)) == value]
    if not chosen:
        there = sorted({str(row.facts[key]) for row in run.gpu_rows if key in row.facts})
        raise NotComparableError(
            f"{run.path}: no row of GPU time has {key} {value}; there is {', '.join(there) or 'no such fact'}"
        )
    return {tuple(item for item in row.identity if item[0] != key): (row,) for row in chosen}


def _compare_sides(
    before: Side, after: Side, minimum_effect_percent: float, significance: float, missing_counts: bool
) -> Comparison:
    rows: list[RowComparison] = []
    missing: list[Identity] = []
    met: set[Identity] = set()
    # A row that is there by another method only is refused by name, which says more than that it is missing.
    by_another_method = {_apart_from_method(each): each for each in after.rows if each not in before.rows}
    for identity, mine in before.rows.items():
        other = identity if identity in after.rows else by_another_method.get(_apart_from_method(identity))
        if other is None:
            missing.append(identity)
            continue
        met.add(other)
        theirs = after.rows[other]
        refused = why_not_compared(mine, theirs)
        samples = None
        if not refused:
            runs = [[row.samples_us for row in side] for side in (mine, theirs)]
            samples = compare_runs(runs[0], runs[1], minimum_effect_percent, significance)
            samples = _doubted(samples, mine, theirs)
        rows.append(RowComparison(identity, samples, refused))
    added = tuple(identity for identity in after.rows if identity not in met)
    return Comparison(before.name, after.name, tuple(rows), tuple(missing), added, missing_counts)


def _apart_from_method(identity: Identity) -> Identity:
    return tuple(item for item in identity if item[0] not in TIMED_BY)


def held_back(rows: Sequence[Row]) -> str:
    """What held the GPU back in these rows, in words; empty if nothing was seen to."""
    return ", ".join(sorted({reason for row in rows for reason in row.throttled_by}))


def _doubted(samples: SampleComparison, before: Sequence[Row], after: Sequence[Row]) -> SampleComparison:
    """What a limit may have made is no verdict on the code. It only makes a side slower, so the other direction stands."""
    limits = {"before": held_back(before), "after": held_back(after)}
    limited = any(limits.values())
    doubted = {
        Speed.SLOWER: bool(limits["after"]),
        Speed.FASTER: bool(limits["before"]),
        Speed.SAME: limited and any(_clock_differences(before[0], after[0], "sm_clock_mhz", "SM")),
        Speed.UNSURE: False,
    }
    if not doubted[samples.speed]:
        return samples
    said = " and ".join(f"{side} by the {reasons}" for side, reasons in limits.items() if reasons)
    return replace(samples, speed=Speed.UNSURE, reason=f"the GPU was held back {said}")


def why_not_compared(before: Sequence[Row], after: Sequence[Row]) -> str:
    """Why times of these rows must not be compared, naming both values; empty if they may be."""
    first, *others = (*before, *after)
    limited = bool(held_back([first, *others]))
    return next((reason for row in others for reason in _differences(first, row, limited)), "")


def _differences(first: Row, other: Row, limited: bool) -> Iterator[str]:
    """What differs. An SM clock that a limit moved is the limit's, and `_doubted` sees to it."""
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
    mine, theirs = _ends(first.facts.get(key)), _ends(other.facts.get(key))
    if not _clocks_agree(mine, theirs):
        yield f"two {clock} clocks: {_mhz(mine)} and {_mhz(theirs)}"


def _ends(clock_mhz: Any) -> tuple[float, ...]:
    """The ends of a recorded range of clocks; one clock is a range of itself, and None of nothing."""
    if clock_mhz is None:
        return ()
    return tuple(clock_mhz) if isinstance(clock_mhz, Sequence) else (clock_mhz, clock_mhz)


def _clocks_agree(before: tuple[float, ...], after: tuple[float, ...]) -> bool:
    """Both ends alike: a range that reaches lower was, for some samples, another state."""
    return len(before) == len(after) and all(
        abs(mine - other) <= CLOCK_TOLERANCE_PERCENT / 100 * max(mine, other)
        for mine, other in zip(before, after, strict=True)
    )


def _mhz(ends: tuple[float, ...]) -> str:
    if not ends:
        return "not recorded"
    return f"{ends[0]:g} MHz" if ends[0] == ends[-1] else f"{ends[0]:g} to {ends[-1]:g} MHz"


def _refuse_other_machines(runs: Sequence[RecordedRun]) -> None:
    first = runs[0]
    for run in runs:
        if not run.environment_at(("gpu",)):
            raise NotComparableError(f"{run.path} names no GPU, and a time without one is not compared")
        for name, where in MUST_AGREE.items():
            mine, other = first.environment_at(where), run.environment_at(where)
            if mine != other:
                raise NotComparableError(f"another {name}: {mine} in {first.path}, {other} in {run.path}")


def _print(comparison: Comparison, before: Sequence[RecordedRun], after: Sequence[RecordedRun]) -> None:
    from rich.console import Console

    print(f"before: {comparison.before}\nafter: {comparison.after}")
    for name, was, now in _header(before, after):
        print(f"{name}: {was}" if was == now else f"{name}: {was} before, {now} after")
    if comparison.rows:
        print("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in _same(comparison.rows)))
        console = Console(markup=False, highlight=False)
        if not console.is_terminal:
            console.width = WIDTH_WITHOUT_TERMINAL
        console.print(_table(comparison))
    for line in _remarks(comparison):
        print(line)
    others = sum(len(run.other_rows) for run in {run.path: run for run in (*before, *after)}.values())
    if others:
        print(f"not compared, being host time or of no recorded clock: {others}")
    print(_summary(comparison))


def _remarks(comparison: Comparison) -> Iterator[str]:
    for row in comparison.rows:
        if row.refused:
            yield f"refused: {in_words(row.identity)}: {row.refused}"
        elif row.samples and row.samples.reason:
            yield f"unsure: {in_words(row.identity)}: {row.samples.reason}"
    for side, identities in (("before", comparison.missing), ("after", comparison.added)):
        for identity in identities:
            yield f"only {side}: {in_words(identity)}"


def _header(before: Sequence[RecordedRun], after: Sequence[RecordedRun]) -> Iterator[tuple[str, str, str]]:
    packages = sorted({name for run in (*before, *after) for name in run.environment.get("packages") or {}})
    for name, where in {**SHOWN, **{name: ("packages", name) for name in packages}}.items():
        was, now = (
            ", ".join(sorted({str(run.environment_at(where)) for run in runs if run.environment_at(where) is not None}))
            for runs in (before, after)
        )
        if was or now:
            yield name, was or "not recorded", now or "not recorded"


def _settings(rows: Sequence[RowComparison]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name, _ in row.identity))


def _same(rows: Sequence[RowComparison]) -> Iterator[tuple[str, str]]:
    """Settings that are the same in all rows: said once, they leave the table narrow."""
    for name in _settings(rows):
        values = {dict(row.identity).get(name, "") for row in rows}
        if len(values) == 1 and name != "scenario":
            yield name, values.pop()


def _table(comparison: Comparison) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    same = dict(_same(comparison.rows))
    names = [name for name in _settings(comparison.rows) if name not in same]
    table = Table(box=SIMPLE_HEAD)
    for name in names:
        table.add_column(name.replace("_", " "), overflow="fold")
    for name in ("before, µs", "after, µs", "effect", "interval", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in comparison.rows:
        settings = dict(row.identity)
        cells = [Text(settings.get(name, "")) for name in names]
        if row.samples is None:
            table.add_row(*cells, *[Text("")] * 5, Text("REFUSED", style="magenta"))
        else:
            change = row.samples.speed
            table.add_row(*cells, *_numbers(row.samples), Text(change.name, style=STYLES[change]))
    return table


def _numbers(samples: SampleComparison) -> list[str]:
    interval = samples.interval_percent
    return [
        f"{samples.before_us:,.2f}",
        f"{samples.after_us:,.2f}",
        f"{samples.effect_percent:+.1f} %",
        f"{interval[0]:+.1f} … {interval[1]:+.1f} %" if interval else "unknown",
        f"{samples.p_value:.1g}",
    ]


def _summary(comparison: Comparison) -> str:
    counts = Counter(samples.speed for samples in comparison.compared)
    words = [f"{counts[change]} {change.name}" for change in Speed]
    words += [
        f"{len(comparison.refused)} refused",
        f"{len(comparison.missing)} missing",
        f"{len(comparison.added)} new",
    ]
    if not comparison.compared:
        return ", ".join(words) + "; nothing was compared"
    mean = geometric_mean([samples.ratio for samples in comparison.compared])
    return f"{', '.join(words)}; after over before, geometric mean of {len(comparison.compared)}: {mean:.3f}"


if __name__ == "__main__":
    sys.exit(main())
