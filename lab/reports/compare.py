"""Compare the times of recorded runs, or of two implementations or settings within one run, in a table with changed rows first.

A row of the run BEFORE is compared with the row of the run AFTER that has the same scenario, implementation, page size, dtypes,
clock and state of the L2 cache. Driver, versions and commit may differ. Runs with different GPUs, power limits or maximum
clocks are not compared. Two rows are refused if they were measured by different methods, did different work or ran at different
GPU clocks.

A GPU reduces its clocks at a limit, such as its power limit. The verdict is UNSURE instead of SLOWER if the GPU was limited in
AFTER, instead of FASTER if the GPU was limited in BEFORE, and instead of SAME if the GPU was limited in one run and the SM
clocks of the runs differ.

Exit status, the first that holds:
    2    a file cannot be read as a run
    125  nothing was compared: the runs were refused, or no pair of rows is left
    1    a row is SLOWER; or AFTER lacks a row that BEFORE has; or, with --strict, a row is UNSURE
    125  a row was refused
    0    otherwise

Within one run (--by) a row that only one side has is listed but does not change the exit status, because an implementation may
not support a scenario.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from lab.exit_status import ExitStatus
from lab.reports.recorded import TIMED_BY, Identity, RecordedRun, Row, in_words, read_runs, without
from lab.reports.recorded_file import NotComparableError, facts_of_sides, value_at
from lab.reports.tables import ABSENT, Cell, Columns, TableReport, grouped, make_table, number
from lab.timing.method import L2
from lab.timing.roofline import why_impossible
from lab.timing.statistics import BETWEEN_RUNS, Rule, SampleComparison, Speed, compare_runs
from lab.wording import counted

# An NVIDIA GPU moves its SM clock in steps of 15 MHz (0.8 % of 1980 MHz). A few steps are the same state; a power cap is not.
CLOCK_TOLERANCE_PERCENT = 3.0
# Facts of `lab.provenance.environment` that must agree for times to be comparable.
MUST_AGREE = {
    "GPU": ("gpu",),
    "power limit": ("nvidia_smi", "power.limit"),
    "maximum SM clock": ("nvidia_smi", "clocks.max.sm"),
}
CLOCKS = {"memory_clock_mhz": "memory", "sm_clock_mhz": "SM"}
# Rows with the same name did different work if one of these facts differs.
WORK = ("requests", "query_tokens", "kv_tokens", "bytes_moved", "operations")
# The order of rows: changed rows first, unchanged rows last. None stands for a refused row.
CHANGED_FIRST = (Speed.SLOWER, Speed.FASTER, Speed.UNSURE, None, Speed.SAME)

RowsOfSide = Mapping[Identity, Sequence[Row]]  # rows of GPU time by what they measure, one row per repeated run


@dataclass(frozen=True)
class RowComparison:
    """The comparison of two times of one measurement, before and after, or the reason why they are not compared."""

    identity: Identity
    samples: SampleComparison | None = None  #: the comparison of the times; None: refused
    refused: str = ""  #: why the times are not compared; "": they are


def compare(
    before: str | Path,
    after: str | Path | None = None,
    by: tuple[str, str, str] | None = None,
    rule: Rule = BETWEEN_RUNS,
    strict: bool = False,
) -> TableReport:
    """Compare the recorded times of two paths, each a file or a folder of repeated runs.

    Args:
        by: (field, first value, second value), such as ("implementation", "lab.kernels.portable", "lab.kernels.trtllm"): rows
            of one run with the first value are compared with those with the second one. `after` must then be None.
        strict: the exit status is 1 also if a row is UNSURE, not only if a row is SLOWER or missing.

    Raises:
        RecordedFileError: a path holds no recorded run.
        NotComparableError: both sides are the same, or were measured on different GPUs, or no row has a value of `by`.
    """
    if after is not None and os.path.realpath(before) == os.path.realpath(after):
        raise NotComparableError(f"both sides are {before}: there is nothing to compare")
    first = read_runs(before)
    second = first if after is None else read_runs(after)
    if by is None:
        names = [", ".join(str(run.path) for run in runs) for runs in (first, second)]
        sides: Sequence[RowsOfSide] = [
            grouped((row.identity, row) for run in runs for row in run.gpu_rows) for runs in (first, second)
        ]
    else:
        key, *values = by
        names = [f"{key} {value}" for value in values]
        sides = _sides_within(first, key, values)
    _refuse_other_machines([*first, *second])
    rows, missing, added = _compare_sides(sides[0], sides[1], rule)
    summary = _summary(rows, missing, added)
    facts = facts_of_sides([run.environment for run in first], [run.environment for run in second])
    same = [f"{name} {was}" for name, (was, now) in facts.items() if was == now]
    settings = {
        name.replace("_", " "): lambda row, name=name: Cell(dict(row.identity).get(name, ""))
        for row in rows
        for name, _ in row.identity
    }
    table = make_table({**settings, **FIGURES}, rows, say_once=settings.keys() - {"scenario"})
    runs = {run.path: run for run in (*first, *second)}.values()
    not_gpu_time = sum(len(run.other_rows) for run in runs)
    remarks = [*_reasons(rows, [name.replace(" ", "_") for name, _ in table.common])]
    for side, alone in (("before", missing), ("after", added)):
        remarks += [f"only {side}: {in_words(identity)}" for identity in alone]
    if not_gpu_time:
        num_rows = counted(not_gpu_time, "row")
        remarks.append(f"not compared, because they are host time or have no recorded clock: {num_rows}")
    return TableReport(
        above=(
            f"minimum effect {rule.minimum_effect_percent:g} %, significance {rule.significance:g}, "
            f"intervals of {rule.confidence_percent:g} %",
            f"before: {names[0]}",
            f"after: {names[1]}",
            *(f"{name}: {was} before, {now} after" for name, (was, now) in facts.items() if was != now),
            *([f"both: {', '.join(same)}"] if same else []),
            *(f"{name}: {value}" for name, value in table.common),
        ),
        table=table,
        below=(*remarks, summary),
        record={
            "before": names[0],
            "after": names[1],
            "environment": {name: {"before": was, "after": now} for name, (was, now) in facts.items()},
            "minimum_effect_percent": rule.minimum_effect_percent,
            "significance": rule.significance,
            "rows": [
                dict(row.identity)
                | (comparison_record(row.samples) if row.samples else {"verdict": "refused", "reason": row.refused})
                for row in rows
            ],
            "only_before": [dict(identity) for identity in missing],
            "only_after": [dict(identity) for identity in added],
            "summary": summary,
        },
        exit_status=_exit_status(rows, is_strict=strict, misses_rows=bool(missing) and by is None),
    )


def _summary(rows: Sequence[RowComparison], missing: Sequence[Identity], added: Sequence[Identity]) -> str:
    compared = [row.samples for row in rows if row.samples is not None]
    counts = Counter(samples.speed for samples in compared)
    words = [f"{counts[speed]} {speed.name}" for speed in Speed]
    words += [f"{len(rows) - len(compared)} refused", f"{len(missing)} missing", f"{len(added)} new"]
    if not compared:
        return ", ".join(words) + "; nothing was compared"
    mean = geometric_mean([samples.ratio for samples in compared])
    return f"{', '.join(words)}; after over before, geometric mean of {len(compared)}: {mean:.3f}"


def _exit_status(rows: Sequence[RowComparison], *, is_strict: bool, misses_rows: bool) -> ExitStatus:
    changes = {row.samples.speed for row in rows if row.samples is not None}
    if not changes:
        return ExitStatus.NOT_JUDGED
    if misses_rows or Speed.SLOWER in changes or (is_strict and Speed.UNSURE in changes):
        return ExitStatus.WRONG
    return ExitStatus.NOT_JUDGED if any(row.refused for row in rows) else ExitStatus.DONE


def comparison_record(samples: SampleComparison) -> dict[str, Any]:
    return {"verdict": samples.speed.value} | {name: value for name, value in vars(samples).items() if name != "speed"}


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


FIGURES: Columns = {
    "before, µs": _figure(lambda samples: number(samples.before_us, 2)),
    "after, µs": _figure(lambda samples: number(samples.after_us, 2)),
    "effect, %": _figure(lambda samples: Cell(f"{samples.effect_percent:+.1f}", samples.effect_percent)),
    "interval, %": _figure(_interval),
    "p": _figure(lambda samples: Cell(f"{samples.p_value:.1g}", samples.p_value)),
    "verdict": _verdict,
}


def _reasons(rows: Sequence[RowComparison], shared: Iterable[str]) -> Iterator[str]:
    reasons = grouped(
        (f"{'refused' if row.refused else 'unsure'}, {reason}", row.identity)
        for row in rows
        if (reason := row.refused or (row.samples.reason if row.samples else ""))
    )
    for reason, identities in reasons.items():
        yield f"{reason}: {'; '.join(in_words(without(each, *shared)) for each in identities)}"


def _sides_within(runs: Sequence[RecordedRun], key: str, values: Sequence[str]) -> Sequence[RowsOfSide]:
    if values[0] == values[1]:
        raise NotComparableError(f"both sides are {key} {values[0]}: there is nothing to compare")
    if key in (*TIMED_BY, "method"):
        raise NotComparableError(
            f"two values of {key} are two methods, and those are not compared: {', '.join(values)}"
        )
    if len(runs) > 1:
        raise NotComparableError(f"--by compares within one run, and there are {len(runs)}")
    (run,) = runs
    sides: list[RowsOfSide] = []
    for value in values:
        chosen = [row for row in run.gpu_rows if str(row.facts.get(key)) == value]
        if not chosen:
            there = sorted({str(row.facts[key]) for row in run.gpu_rows if key in row.facts})
            facts = sorted({fact for row in run.gpu_rows for fact in row.facts})
            known = f"there is {', '.join(there)}" if there else f"{key} is none of their facts: {', '.join(facts)}"
            raise NotComparableError(f"{run.path}: no row of GPU time has {key} {value}; {known}")
        sides.append({without(row.identity, key): [row] for row in chosen})
    return sides


def _refuse_other_machines(runs: Sequence[RecordedRun]) -> None:
    first = runs[0]
    for run in runs:
        if not run.environment.get("gpu"):
            raise NotComparableError(f"{run.path} names no GPU, and a time without one is not compared")
        for name, keys in MUST_AGREE.items():
            mine, other = (value_at(each.environment, keys) for each in (first, run))
            if mine != other:
                raise NotComparableError(f"another {name}: {mine} in {first.path}, {other} in {run.path}")


def _compare_sides(
    before: RowsOfSide, after: RowsOfSide, rule: Rule
) -> tuple[list[RowComparison], list[Identity], list[Identity]]:
    """Return (comparisons, changed rows first; what only `before` measured; what only `after` measured)."""
    # A row that AFTER measured only by another method is compared and refused, which says more than "missing".
    by_another_method = {without(each, *TIMED_BY): each for each in after if each not in before}
    others = {each: each if each in after else by_another_method.get(without(each, *TIMED_BY)) for each in before}
    rows = []
    for identity, other in others.items():
        if other is not None:
            refused = _why_not_compared(before[identity], after[other])
            samples = None if refused else _compared(before[identity], after[other], rule)
            rows.append(RowComparison(identity, samples, refused))
    rows.sort(key=lambda row: CHANGED_FIRST.index(row.samples.speed if row.samples else None))
    missing = [identity for identity, other in others.items() if other is None]
    return rows, missing, [each for each in after if each not in others.values()]


def _limits_of(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({reason for row in rows for reason in row.throttled_by}))


def _compared(before: Sequence[Row], after: Sequence[Row], rule: Rule) -> SampleComparison:
    """Compare two sides' times. The verdict is UNSURE if a limit of the GPU, such as its power limit, may be the cause."""
    samples = compare_runs([row.samples_us for row in before], [row.samples_us for row in after], rule)
    limits = {"before": _limits_of(before), "after": _limits_of(after)}
    clocks_differ = any(_two_clocks(one, other, "sm_clock_mhz") for one in before for other in after)
    doubted = {
        Speed.SLOWER: limits["after"],
        Speed.FASTER: limits["before"],
        Speed.SAME: clocks_differ and any(limits.values()),
        Speed.UNSURE: False,
    }
    if not doubted[samples.speed]:
        return samples
    limits_of_sides = " and ".join(f"{side} by the {reasons}" for side, reasons in limits.items() if reasons)
    return replace(samples, speed=Speed.UNSURE, reason=f"the GPU was held back {limits_of_sides}")


def _why_not_compared(before: Sequence[Row], after: Sequence[Row]) -> str:
    for side, rows in (("before", before), ("after", after)):
        if why := next(filter(None, map(_why_impossible, rows)), ""):
            return f"the time {side} is refused: {why}"
    first, *others = (*before, *after)
    clocks = [clock for clock in CLOCKS if clock != "sm_clock_mhz" or not _limits_of([first, *others])]
    for other in others:
        for what, mine, theirs in (
            ("methods", first.timed_by, other.timed_by),
            ("methods", first.facts.get("method"), other.facts.get("method")),
            *((f"workloads, {key}", first.facts.get(key), other.facts.get(key)) for key in WORK),
        ):
            if mine != theirs:
                return f"two {what}: {mine} and {theirs}"
        if why := next(filter(None, (_two_clocks(first, other, clock) for clock in clocks)), ""):
            return why
    return ""


def _why_impossible(row: Row) -> str:
    facts = row.facts
    if facts.get("bandwidth_percent") is None or facts.get("matrix_rate_percent") is None:
        return ""
    is_cold = facts.get("l2") != L2.WARM.value
    kv_dtype = str(facts.get("kv_dtype", ""))
    return why_impossible(facts["bandwidth_percent"], facts["matrix_rate_percent"], is_cold=is_cold, kv_dtype=kv_dtype)


def _two_clocks(first: Row, other: Row, key: str) -> str:
    mine, theirs = _ends(first.facts.get(key)), _ends(other.facts.get(key))
    agree = partial(isclose, rel_tol=CLOCK_TOLERANCE_PERCENT / 100)
    if len(mine) == len(theirs) and all(map(agree, mine, theirs)):
        return ""
    in_mhz = (" to ".join(dict.fromkeys(f"{end:g}" for end in ends)) for ends in (mine, theirs))
    return f"two {CLOCKS[key]} clocks: " + " and ".join(f"{mhz} MHz" if mhz else "not recorded" for mhz in in_mhz)


def _ends(clock_mhz: Any) -> Sequence[float]:
    return () if clock_mhz is None else clock_mhz if isinstance(clock_mhz, Sequence) else (clock_mhz, clock_mhz)
