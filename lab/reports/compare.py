"""Compare recorded runs, or two implementations or settings within one: a table with the changed rows first.

    python -m lab.reports.compare BEFORE.json AFTER.json
    python -m lab.reports.compare BEFORE_RUNS/ AFTER_RUNS/
    python -m lab.reports.compare RUN.json --by implementation lab.kernels.portable lab.kernels.trtllm

A folder holds repeated runs of one side. Rows are paired by scenario, implementation, page size, dtypes, clock and L2. Driver,
versions and commit may differ: they are what is compared. Refused are another GPU, power limit or maximum clock (nothing
is compared then), and row by row another method, other work or other clocks. Where a limit held the GPU back, such as its
power, what the limit may have made is UNSURE: SLOWER if it held AFTER back, FASTER if BEFORE, SAME if the SM clocks differ.

Exit status, the first that holds:
    2    a file cannot be read as a run
    125  nothing was compared: refused as a whole, or no pair of rows left
    1    a row is SLOWER; or AFTER lacks a row that BEFORE has; or, with --strict, a row is UNSURE
    125  a row was refused
    0    otherwise

So 1 stands beside refused rows: what was seen to be slower stays slower. Within one run (--by) a row that only one
side has is listed and does not count, because an implementation may decline a case.

pytest-benchmark's own `--benchmark-compare --benchmark-compare-fail=median:5%` works on the same rows and exits with 1; it
looks at the medians alone, and refuses nothing.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from lab.reports.comparison import (
    NOT_COMPARED,
    NotComparableError,
    RowComparison,
    RunComparison,
    compare_recorded,
    compare_within,
)
from lab.reports.recorded import RecordedFileError, RecordedRun, environment_facts, in_words, read_runs
from lab.reports.tables import Cell, Table, TableReport, make_table, number
from lab.timing.statistics import BETWEEN_RUNS, Rule, SampleComparison, Speed

# Of the environments' facts, those that are shown besides the packages.
SHOWN = ("GPU", "commit", "driver", "CUDA", "Python")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    rule = rule_of(parser, options)
    if (options.after is None) == (options.by is None):
        parser.error("compare BEFORE with AFTER, or within BEFORE --by KEY and two of its values")
    try:
        by = None if options.by is None else tuple(options.by)
        report = compare(options.before, options.after, by, rule, options.strict)
    except (RecordedFileError, NotComparableError) as error:
        print(f"not compared: {error}", file=sys.stderr)
        return 2 if isinstance(error, RecordedFileError) else NOT_COMPARED
    report.show(options.json, options.markdown)
    return report.exit_status


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
        raise NotComparableError(f"both sides are {before}: that says nothing")
    first = read_runs(before)
    second = first if after is None else read_runs(after)
    comparison = compare_recorded(first, second, rule) if by is None else compare_within(_only(first), *by, rule)
    return _report(comparison, rule, first, second, strict)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lab.reports.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", metavar="BEFORE", help="a recorded run, or a folder of repeated ones")
    parser.add_argument("after", metavar="AFTER", nargs="?", help="the same of the other side")
    parser.add_argument(
        "--by", nargs=3, metavar=("KEY", "BEFORE", "AFTER"), help="two values of one recorded fact, within one run"
    )
    add_rule(parser, BETWEEN_RUNS)
    parser.add_argument("--strict", action="store_true", help="exit with 1 on an UNSURE row too")
    add_outputs(parser)
    return parser


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that write the report."""
    for form in ("json", "markdown"):
        parser.add_argument(f"--{form}", metavar="PATH", help="write it there too; - for the output, without the table")


def add_rule(parser: argparse.ArgumentParser, rule: Rule) -> None:
    """Add the options that are the rule's numbers, with those of `rule` as defaults."""
    for name, words in (
        ("minimum_effect_percent", "a smaller change is none"),
        ("significance", "of the rank test and the interval"),
    ):
        option, default = f"--{name.replace('_', '-')}", getattr(rule, name)
        parser.add_argument(option, type=float, default=default, help=f"{words} (default %(default)s)")


def rule_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Rule:
    """Return the rule of the options of `add_rule`; numbers out of range are an error of the command line."""
    try:
        return Rule(given.minimum_effect_percent, given.significance)
    except ValueError as error:
        parser.error(str(error))


def _only(runs: Sequence[RecordedRun]) -> RecordedRun:
    if len(runs) > 1:
        raise NotComparableError(f"--by compares within one run, and there are {len(runs)}")
    return runs[0]


def _report(
    comparison: RunComparison, rule: Rule, before: Sequence[RecordedRun], after: Sequence[RecordedRun], strict: bool
) -> TableReport:
    header = {name: (was, now) for name, was, now in _header(before, after)}
    same = [f"{name} {was}" for name, (was, now) in header.items() if was == now]
    table = comparison_table(comparison)
    others = sum(len(run.other_rows) for run in {run.path: run for run in (*before, *after)}.values())
    below = list(_remarks(comparison, {name for name, _ in table.common}))
    if others:
        below.append(f"not compared, being host time or of no recorded clock: {others}")
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
    return {
        "verdict": samples.speed.value,
        "before_us": samples.before_us,
        "after_us": samples.after_us,
        "effect_percent": samples.effect_percent,
        "interval_percent": samples.interval_percent,
        "p_value": samples.p_value,
        "reason": samples.reason,
    }


def comparison_table(comparison: RunComparison) -> Table:
    """Make a table of one row per pair; settings that are the same in all rows are said once."""
    settings = dict.fromkeys(name for row in comparison.rows for name, _ in row.identity)
    columns = {name.replace("_", " "): partial(_setting, name) for name in settings}
    return make_table({**columns, **FIGURES}, comparison.rows, say_once=set(columns) - {"scenario"})


def _setting(name: str, row: RowComparison) -> Cell:
    return Cell(dict(row.identity).get(name, ""))


def _figure(of: Callable[[SampleComparison], Cell]) -> Callable[[RowComparison], Cell]:
    return lambda row: Cell("") if row.samples is None else of(row.samples)


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


def _header(before: Sequence[RecordedRun], after: Sequence[RecordedRun]) -> Iterator[tuple[str, str, str]]:
    facts = environment_facts([run.environment for run in (*before, *after)])
    for name, where in facts.items():
        was, now = (
            ", ".join(sorted({str(run.fact(*where)) for run in runs if run.fact(*where) is not None}))
            for runs in (before, after)
        )
        if (was or now) and (name in SHOWN or where[0] == "packages"):
            yield name, was or "not recorded", now or "not recorded"


def _summary(comparison: RunComparison) -> str:
    counts = Counter(samples.speed for samples in comparison.compared)
    words = [f"{counts[speed]} {speed.name}" for speed in Speed]
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
