"""Compare recorded runs, or two implementations or settings within one: a table with the changed rows first.

    lab compare BEFORE.json AFTER.json
    lab compare BEFORE_RUNS/ AFTER_RUNS/
    lab compare RUN.json --by implementation lab.kernels.portable lab.kernels.trtllm

A folder holds repeated runs of one side. Rows are paired by scenario, implementation, page size, dtypes, clock and L2. Driver,
versions and commit may differ: they are what is compared. Refused are another GPU, power limit or maximum clock (nothing
is compared then), and row by row another method, other work or other clocks. A verdict that a limit of the GPU may
have caused, such as its power limit, becomes UNSURE: SLOWER if the limit held AFTER back, FASTER if it held BEFORE back, SAME
if it held either back and the SM clocks differ.

Exit status, the first that holds:
    2    a file cannot be read as a run
    125  nothing was compared: refused as a whole, or no pair of rows left
    1    a row is SLOWER; or AFTER lacks a row that BEFORE has; or, with --strict, a row is UNSURE
    125  a row was refused
    0    otherwise

So a SLOWER row gives 1 even if other rows were refused. Within one run (--by) a row that only one
side has is listed and does not count, because an implementation may decline a case.

pytest-benchmark's own `--benchmark-compare --benchmark-compare-fail=median:5%` works on the same rows and exits with 1; it
looks at the medians alone, and refuses nothing.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from lab.reports.comparison import NotComparableError, RowComparison, RunComparison, compare_recorded, compare_within
from lab.reports.recorded import RecordedRun, facts_of_sides, in_words, read_runs
from lab.reports.tables import ABSENT, Cell, Table, TableReport, make_table, number
from lab.timing.statistics import BETWEEN_RUNS, Rule, SampleComparison, Speed
from lab.wording import counted


def compare(
    before: str | Path,
    after: str | Path | None = None,
    by: tuple[str, str, str] | None = None,
    rule: Rule = BETWEEN_RUNS,
    strict: bool = False,
) -> TableReport:
    """Compare the recorded runs of two paths, or two values of one recorded fact within one run.

    Args:
        before, after: a recorded run each, or a folder of repeated ones; `after` is None with `by`.
        by: the fact and its two values, such as ("implementation", "lab.kernels.portable", "lab.kernels.trtllm").
        strict: an UNSURE row gives the exit status 1 too.

    Raises:
        RecordedFileError: a path holds no recorded run.
        NotComparableError: the two sides must not be compared.
    """
    if after is not None and Path(before).resolve() == Path(after).resolve():
        raise NotComparableError(f"both sides are {before}: there is nothing to compare")
    first = read_runs(before)
    second = first if after is None else read_runs(after)
    comparison = compare_recorded(first, second, rule) if by is None else compare_within(_only(first), *by, rule)
    return _report(comparison, rule, first, second, strict)


def _only(runs: Sequence[RecordedRun]) -> RecordedRun:
    if len(runs) > 1:
        raise NotComparableError(f"--by compares within one run, and there are {len(runs)}")
    return runs[0]


def _report(
    comparison: RunComparison, rule: Rule, before: Sequence[RecordedRun], after: Sequence[RecordedRun], strict: bool
) -> TableReport:
    header = {name: (was, now) for name, was, now in facts_of_sides(before, after)}
    same = [f"{name} {was}" for name, (was, now) in header.items() if was == now]
    table = comparison_table(comparison)
    not_gpu_time = sum(len(run.other_rows) for run in {run.path: run for run in (*before, *after)}.values())
    below = list(_remarks(comparison, {name for name, _ in table.common}))
    if not_gpu_time:
        below.append(
            f"not compared, because they are host time or have no recorded clock: {counted(not_gpu_time, 'row')}"
        )
    return TableReport(
        above=(
            f"minimum effect {rule.minimum_effect_percent:g} %, significance {rule.significance:g}, "
            f"intervals of {rule.confidence_percent:g} %",
            f"before: {comparison.before}",
            f"after: {comparison.after}",
            *(f"{name}: {was} before, {now} after" for name, (was, now) in header.items() if was != now),
            *([f"both: {', '.join(same)}"] if same else []),
            *(f"{name}: {value}" for name, value in table.common),
        ),
        table=table,
        below=(*below, _summary(comparison)),
        record={
            "before": comparison.before,
            "after": comparison.after,
            "environment": {name: {"before": was, "after": now} for name, (was, now) in header.items()},
            "minimum_effect_percent": rule.minimum_effect_percent,
            "significance": rule.significance,
            "rows": [_record(row) for row in comparison.rows],
            "only_before": [dict(identity) for identity in comparison.missing],
            "only_after": [dict(identity) for identity in comparison.added],
            "summary": _summary(comparison),
        },
        exit_status=comparison.exit_status(strict),
    )


def _record(row: RowComparison) -> Mapping[str, Any]:
    if row.samples is None:
        return {**dict(row.identity), "verdict": "refused", "reason": row.refused}
    return {**dict(row.identity), **comparison_record(row.samples)}


def comparison_record(samples: SampleComparison) -> dict[str, Any]:
    """Return a comparison as JSON data: the verdict first."""
    return {"verdict": samples.speed.value} | {name: value for name, value in vars(samples).items() if name != "speed"}


def comparison_table(comparison: RunComparison) -> Table:
    """Make a table of one row per pair; settings that are the same in all rows become a note."""
    settings = dict.fromkeys(name for row in comparison.rows for name, _ in row.identity)
    columns = {name.replace("_", " "): partial(_setting, name) for name in settings}
    return make_table({**columns, **FIGURES}, comparison.rows, say_once=set(columns) - {"scenario"})


def _setting(name: str, row: RowComparison) -> Cell:
    return Cell(dict(row.identity).get(name, ""))


def _figure(of: Callable[[SampleComparison], Cell]) -> Callable[[RowComparison], Cell]:
    return lambda row: Cell(ABSENT) if row.samples is None else of(row.samples)


def _interval(samples: SampleComparison) -> Cell:
    if samples.interval_percent is None:
        return Cell("unknown")
    lower, upper = samples.interval_percent
    return Cell(f"{lower:+.1f} … {upper:+.1f}", samples.effect_percent)


def _verdict(row: RowComparison) -> Cell:
    if row.samples is None:
        return Cell("REFUSED", style="refused")
    return Cell(row.samples.speed.name, style=row.samples.speed.value)


FIGURES = {
    "before, µs": _figure(lambda samples: number(samples.before_us, 2)),
    "after, µs": _figure(lambda samples: number(samples.after_us, 2)),
    "effect, %": _figure(lambda samples: Cell(f"{samples.effect_percent:+.1f}", samples.effect_percent)),
    "interval, %": _figure(_interval),
    "p": _figure(lambda samples: Cell(f"{samples.p_value:.1g}", samples.p_value)),
    "verdict": _verdict,
}


def _remarks(comparison: RunComparison, said_once: Collection[str]) -> Iterator[str]:
    """Yield each reason once, with the rows that it holds for, named by what tells them apart."""
    reasons: dict[str, list[str]] = {}
    for row in comparison.rows:
        reason = row.refused or (row.samples.reason if row.samples else "")
        if reason:
            name = in_words(tuple(item for item in row.identity if item[0].replace("_", " ") not in said_once))
            reasons.setdefault(f"{'refused' if row.refused else 'unsure'}, {reason}", []).append(name)
    for reason, names in reasons.items():
        yield f"{reason}: {'; '.join(names)}"
    for side, identities in (("before", comparison.missing), ("after", comparison.added)):
        for identity in identities:
            yield f"only {side}: {in_words(identity)}"


def _summary(comparison: RunComparison) -> str:
    counts = Counter(samples.speed for samples in comparison.compared)
    words = [f"{counts[speed]} {speed.name}" for speed in Speed]
    rest = {"refused": comparison.refused, "missing": comparison.missing, "new": comparison.added}
    words += [f"{len(rows)} {name}" for name, rows in rest.items()]
    if not comparison.compared:
        return ", ".join(words) + "; nothing was compared"
    mean = geometric_mean([samples.ratio for samples in comparison.compared])
    return f"{', '.join(words)}; after over before, geometric mean of {len(comparison.compared)}: {mean:.3f}"
