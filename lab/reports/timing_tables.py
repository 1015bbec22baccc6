"""Recorded benchmarks as tables, for the Markdown report and for the page: GPU time and its floor, host time, ceilings."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lab.reports.recorded import RecordedRun, Row, grouped
from lab.reports.tables import ABSENT, Cell, Columns, Table, make_table, number, words
from lab.timing.statistics import IN_TURNS, Speed, compare_samples

MODULE_PREFIX = "lab.kernels."
THROTTLED = "**throttled**"
# A launch alone takes one to two microseconds: time over a floor shorter than this means nothing, and has no bar.
LEAST_FLOOR_US = 1.0
FEWEST_SIDE_BY_SIDE = 3  # for two implementations, the table of the fastest is enough


def _fact(key: str, digits: int, scale: float = 1.0) -> Callable[[Row], Cell]:
    return lambda row: number(row.facts.get(key), digits, scale)


def _word(key: str) -> Callable[[Row], Cell]:
    return lambda row: words(row.facts.get(key))


def implementation_of(row: Row) -> str:
    """Return the implementation's name without the package of kernels; "" if it is not recorded."""
    return str(row.facts.get("implementation") or "").removeprefix(MODULE_PREFIX)


def time_over_floor(row: Row) -> float | None:
    """Return the median over the floor; None where the floor is not recorded, or too short to mean something."""
    floor_us = row.facts.get("floor_us") or 0.0
    return row.median_us / floor_us if floor_us >= LEAST_FLOOR_US else None


# A column each in a table of one run, unless they are the same in all rows; then they are a note.
SETTINGS: Columns = {
    "timed by": lambda row: words(row.timed_by),
    "page size": _fact("page_size", 0),
    "dtype": _word("dtype"),
    "K/V dtype": _word("kv_dtype"),
}
GPU_COLUMNS: Columns = {
    "scenario": lambda row: words(row.scenario),
    "implementation": lambda row: words(implementation_of(row)),
    "kernel": _word("kernel"),
    "median, µs": lambda row: number(row.median_us, 2),
    "floor, µs": _fact("floor_us", 2),
    "time over floor": lambda row: number(time_over_floor(row), 2),
    "bound by": _word("floor_bound"),
    "timed by": SETTINGS["timed by"],
    "held back by": lambda row: words(", ".join(row.throttled_by)),
    "IQR, %": lambda row: number(row.iqr_percent, 1),
    "GB/s": _fact("bandwidth_gbps", 0),
    "% of memory": _fact("bandwidth_percent", 0),
    "TFLOP/s": _fact("rate_tflops", 1),
    "% of matrix": _fact("matrix_rate_percent", 0),
    "mode": _word("mode"),
    **{heading: SETTINGS[heading] for heading in ("page size", "dtype", "K/V dtype")},
    "requests": _fact("requests", 0),
    "query tokens": _fact("query_tokens", 0),
    "keys": _fact("kv_tokens", 0),
    "MB": _fact("bytes_moved", 1, 1e-6),
    "GFLOP": _fact("operations", 1, 1e-9),
    "launches": _fact("launches", 0),
    "host, µs": _fact("host_us", 1),
    "plan, µs": _fact("plan_us", 1),
}
PLAIN_COLUMNS: Columns = {
    "benchmark": lambda row: words(row.name),
    "median, µs": lambda row: number(row.median_us, 2),
    "IQR, %": lambda row: number(row.iqr_percent, 1),
    "samples": lambda row: number(len(row.samples_us)),
    "method": _word("method"),
}


def _noted(heading: str, note: str, unit: str = "") -> Callable[[Row], Cell]:
    """Return a column with another one's text in brackets after its own, where there is one."""

    def cell(row: Row) -> Cell:
        said, noted = GPU_COLUMNS[heading](row), GPU_COLUMNS[note](row).text + unit
        return said if noted in (ABSENT + unit, said.text) else Cell(f"{said.text} ({noted})", said.number)

    return cell


def _median(row: Row) -> Cell:
    median = GPU_COLUMNS["median, µs"](row)
    return Cell(f"{median.text} {THROTTLED}", median.number) if row.throttled_by else median


def narrow_columns(settings: Sequence[str]) -> Columns:
    """Return the columns of a report on paper: fewer than `GPU_COLUMNS`, shares and bounds in brackets.

    Args:
        settings: names of `SETTINGS` that tell rows of this run apart.
    """
    return {
        "scenario": GPU_COLUMNS["scenario"],
        "implementation": _noted("implementation", "kernel"),
        **{name: SETTINGS[name] for name in settings},
        **{heading: GPU_COLUMNS[heading] for heading in ("requests", "query tokens", "keys")},
        "median, µs": _median,
        "IQR, %": GPU_COLUMNS["IQR, %"],
        "GB/s": _noted("GB/s", "% of memory", " %"),
        "TFLOP/s": _noted("TFLOP/s", "% of matrix", " %"),
        "floor, µs": _noted("floor, µs", "bound by"),
        "floor / median, %": _fact("floor_percent", 1),
        **{heading: GPU_COLUMNS[heading] for heading in ("MB", "GFLOP", "launches", "host, µs", "plan, µs")},
    }


def timing_tables(run: RecordedRun, name: str) -> list[Table]:
    """Make tables of GPU time, host time, and times without a stated clock, which are never compared with each other.

    Args:
        name: what the tables' ids begin with.
    """
    gpu = make_table(
        GPU_COLUMNS, sorted(run.gpu_rows, key=lambda row: row.identity), name=f"{name}-gpu", caption="GPU time"
    )
    host = plain_table(run.host_rows, f"{name}-host", "Host time: not GPU time, and not comparable with it")
    others = plain_table(
        run.rows_without_clock, f"{name}-unknown", "Times without a recorded clock: compared with nothing"
    )
    side_by_side, not_timed = side_by_side_table(run, f"{name}-side-by-side"), not_timed_table(run, f"{name}-not-timed")
    return [table for table in (side_by_side, gpu, host, others, not_timed) if table.rows]


def rivals(run: RecordedRun) -> list[list[Row]]:
    """Return the rows of GPU time that differ in their implementation alone, the fastest first."""
    found = grouped(
        (tuple(item for item in row.identity if item[0] != "implementation"), row)
        for row in sorted(run.gpu_rows, key=lambda row: row.median_us)
    )
    return [found[identity] for identity in sorted(found)]


def next_speed(rows: Sequence[Row]) -> Speed | None:
    """Return how the second of `rivals` compares with the first, by the rule for samples in turns; None without a second."""
    return compare_samples(rows[0].samples_us, rows[1].samples_us, IN_TURNS).speed if len(rows) > 1 else None


def fastest_table(run: RecordedRun, name: str = "") -> Table:
    """Make a table of the fastest implementation of each scenario, and how much longer the next one takes.

    A scenario of one implementation is there if its time over floor is known.
    """
    told = [rows for rows in rivals(run) if len(rows) > 1 or time_over_floor(rows[0]) is not None]
    columns: Columns = {
        "scenario": _of_fastest(GPU_COLUMNS["scenario"]),
        "fastest": _of_fastest(_noted("implementation", "kernel")),
        **{heading: _of_fastest(GPU_COLUMNS[heading]) for heading in ("median, µs", "time over floor", "bound by")},
        "next": lambda rows: words(implementation_of(rows[1]) if len(rows) > 1 else None),
        "next takes, times": lambda rows: number(rows[1].median_us / rows[0].median_us if len(rows) > 1 else None, 2),
        "next is": lambda rows: words(speed.name if (speed := next_speed(rows)) else None),
        **{heading: _of_fastest(cell) for heading, cell in SETTINGS.items()},
    }
    return make_table(columns, told, name=name and f"{name}-fastest", caption="Fastest implementation of each scenario")


def _of_fastest(cell: Callable[[Row], Cell]) -> Callable[[Sequence[Row]], Cell]:
    return lambda rows: cell(rows[0])


def side_by_side_table(run: RecordedRun, name: str = "") -> Table:
    """Make a table of each scenario's medians, a column for each implementation; without rows if there are fewer than three.

    The column "fastest" names the fastest and those that are the SAME by the lab's rule for samples in turns.
    """
    names = sorted({implementation_of(row) for row in run.gpu_rows})
    if len(names) < FEWEST_SIDE_BY_SIDE:
        return make_table({}, [], name=name)
    records = [(rows, [implementation_of(row) for row in _as_fast(rows)]) for rows in rivals(run)]
    columns: Columns = {
        "scenario": lambda record: words(record[0][0].scenario),
        "floor, µs": lambda record: GPU_COLUMNS["floor, µs"](record[0][0]),
        "fastest": lambda record: words(", ".join(record[1])),
        **{f"{each}, µs": partial(_median_among, each) for each in names},
        **{heading: partial(_setting_among, cell) for heading, cell in SETTINGS.items()},
    }
    caption = "Implementations side by side, medians; in each scenario their samples were taken in turns"
    return make_table(columns, records, name=name, caption=caption, say_once=SETTINGS)


def _as_fast(rows: Sequence[Row]) -> list[Row]:
    """Return the first of `rivals`, and those that are the same."""
    first, *others = rows
    same = [row for row in others if compare_samples(first.samples_us, row.samples_us, IN_TURNS).speed is Speed.SAME]
    return [first, *same]


def _median_among(name: str, record: tuple[Sequence[Row], Sequence[str]]) -> Cell:
    """Return the cell of an implementation's median, in a style of its own where it is the fastest."""
    rows, fastest = record
    median_us = next((row.median_us for row in rows if implementation_of(row) == name), None)
    return replace(number(median_us, 1), style="faster" if name in fastest else "")


def _setting_among(cell: Callable[[Row], Cell], record: tuple[Sequence[Row], Sequence[str]]) -> Cell:
    return cell(record[0][0])


def not_timed_table(run: RecordedRun, name: str = "") -> Table:
    """Make a table of what declined a scenario, was wrong or is not on the machine, and why; a row for each reason."""
    scenarios = grouped(
        ((each.implementation.removeprefix(MODULE_PREFIX), each.reason), each.scenario or "all")
        for each in run.not_timed
    )
    columns: Columns = {
        "implementation": lambda item: words(item[0][0]),
        "not timed, because": lambda item: words(item[0][1]),
        "scenarios": lambda item: words(", ".join(item[1])),
    }
    return make_table(columns, sorted(scenarios.items()), name=name, caption="Not timed, and why", say_once=())


def plain_table(rows: Sequence[Row], name: str = "", caption: str = "") -> Table:
    """Make a table of rows that are not GPU time."""
    return make_table(PLAIN_COLUMNS, sorted(rows, key=lambda row: row.name), name=name, caption=caption, say_once=())


def methods(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the labels of "timed by" and the method of each."""
    return list(dict.fromkeys((row.timed_by, str(row.facts.get("method") or "no method recorded")) for row in rows))


def ceiling_table(run: RecordedRun, name: str = "") -> Table:
    """Make a table of the rates that the GPU reached in this run and that its vendor states; without rows if there are none."""
    ceilings = run.ceilings
    dtype = f" ({ceilings.matrix_dtype})" if ceilings.matrix_dtype else ""
    lines = [
        ("memory, GB/s", ceilings.bandwidth_gbps, ceilings.datasheet_bandwidth_gbps),
        (f"matrix units, TFLOP/s{dtype}", ceilings.matrix_rate_tflops, ceilings.datasheet_matrix_rate_tflops),
    ]
    columns: dict[str, Callable[[Any], Cell]] = {
        "ceiling": lambda line: words(line[0]),
        "measured in this run": lambda line: number(line[1], 0),
        "datasheet": lambda line: number(line[2], 0),
    }
    caption = f"Ceilings; datasheet: {ceilings.datasheet_source or 'none'}"
    known = [line for line in lines if any(line[1:])]
    return make_table(columns, known, name=name and f"{name}-ceilings", caption=caption, say_once=())
