"""Make the tables of a recorded benchmark run for the Markdown report and the HTML page."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lab.reports.recorded import MODULE_PREFIX, RecordedRun, Rivals, Row
from lab.reports.tables import ABSENT, Cell, Columns, Table, grouped, make_table, number, words
from lab.timing.statistics import Speed
from lab.wording import counted

MEDIAN_STYLES = {Speed.SAME: "faster", Speed.UNSURE: "unsure"}  # by the verdict in a comparison with the fastest one
# Rows are sorted by these facts, so that the tables do not depend on the order of the tests.
ORDER = ("mode", "geometry", "requests", "query_tokens", "kv_tokens", "scenario", "page_size", "clock", "l2")


def sorted_rows(rows: Sequence[Row]) -> list[Row]:
    def place(row: Row) -> tuple[tuple[float, str], ...]:
        values = [*(row.facts.get(key) for key in ORDER), row.name]
        return tuple((value, "") if isinstance(value, int | float) else (0, str(value or "")) for value in values)

    return sorted(rows, key=place)


def _fact(key: str, digits: int, scale: float = 1.0) -> Callable[[Row], Cell]:
    return lambda row: number(row.facts.get(key), digits, scale)


def _positive(key: str, digits: int, scale: float = 1.0) -> Callable[[Row], Cell]:
    return lambda row: number(row.facts.get(key) or None, digits, scale)  # a copy has 0 FLOP, shown as a dash


def _word(key: str) -> Callable[[Row], Cell]:
    return lambda row: words(row.facts.get(key))


def _noted(cell: Callable[[Row], Cell], note: Callable[[Row], Cell], unit: str = "") -> Callable[[Row], Cell]:
    """Return a function that makes a row's cell with a note in brackets, such as "3.1 (80 %)"; the unit follows the note."""

    def with_note(row: Row) -> Cell:
        plain, noted = cell(row), note(row).text
        return plain if noted in (ABSENT, plain.text) else Cell(f"{plain.text} ({noted}{unit})", plain.number)

    return with_note


# Columns of a table of one run. A column with the same text in all rows becomes a note.
SETTINGS: Columns = {
    "timed by": lambda row: words(row.timed_by),
    "page size": _fact("page_size", 0),
    "dtype": _word("dtype"),
    "K/V dtype": _word("kv_dtype"),
}
GPU_COLUMNS: Columns = {
    "scenario": lambda row: words(row.scenario),
    "implementation": _noted(lambda row: words(row.implementation), _word("kernel")),
    "median, µs": lambda row: number(row.median_us, 2),
    "floor, µs": _noted(_fact("floor_us", 2), _word("floor_bound")),
    "time over floor": lambda row: number(row.time_over_floor, 2),
    "held back by": lambda row: words(
        "not known" if row.facts.get("throttled_by") is None else ", ".join(row.throttled_by)
    ),
    "IQR, %": lambda row: number(row.iqr_percent, 1),
    "GB/s": _noted(_fact("bandwidth_gbps", 0), _fact("bandwidth_percent", 0), " %"),
    "TFLOP/s": _noted(_positive("rate_tflops", 1), _positive("matrix_rate_percent", 0), " %"),
    **SETTINGS,
    "requests": _fact("requests", 0),
    "query tokens": _fact("query_tokens", 0),
    "keys": _fact("kv_tokens", 0),
    "MB": _fact("bytes_moved", 1, 1e-6),
    "GFLOP": _positive("operations", 1, 1e-9),
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


def timing_tables(run: RecordedRun) -> list[Table]:
    """Make up to three tables of a run: GPU times, other times, and implementations without a time."""
    gpu = make_table(GPU_COLUMNS, sorted_rows(run.gpu_rows), name="gpu", caption="GPU time")
    by_name = sorted(run.other_rows, key=lambda row: row.name)
    caption = "Host time, and times without a recorded clock: not GPU time"
    others = make_table(PLAIN_COLUMNS, by_name, name="others", caption=caption, say_once=())
    return [table for table in (gpu, others, _not_timed_table(run)) if table.rows]


def _not_timed_table(run: RecordedRun) -> Table:
    scenarios = grouped(
        ((each["implementation"].removeprefix(MODULE_PREFIX), each["reason"]), each["scenario"] or "all")
        for each in run.not_timed
    )
    columns: Columns = {
        "implementation": lambda item: words(item[0][0]),
        "not timed, because": lambda item: words(item[0][1], style="long"),
        "scenarios": lambda item: words(", ".join(item[1]), style="long"),
    }
    return make_table(columns, sorted(scenarios.items()), name="not-timed", caption="Not timed, and why", say_once=())


def fastest_sentence(runs: Sequence[RecordedRun]) -> str:
    """Return a sentence with the number of scenarios in which each implementation is the fastest."""
    compared_by_run = [[rivals for rivals in run.rivals if len(rivals) > 1] for run in runs]
    compared = [rivals for of_run in compared_by_run for rivals in of_run]
    # The first implementation is the fastest only if the second one is SLOWER by the lab's rule.
    wins = Counter(row.implementation for (row, _), (_, speed), *_ in compared if speed is Speed.SLOWER)
    numbers = [f"{name} in {count}" for name, count in wins.most_common()]
    if wins.total() < len(compared):
        numbers.append(f"no clear difference in {len(compared) - wins.total()}")
    scenarios = f"{counted(len(compared), 'scenario')} with several implementations"
    if (num_runs := sum(map(bool, compared_by_run))) > 1:
        scenarios += f", in {num_runs} runs"
    return f"Fastest in {scenarios}: {', '.join(numbers)}." if compared else ""


def _of_fastest(cell: Callable[[Row], Cell]) -> Callable[[Rivals], Cell]:
    return lambda rivals: cell(rivals[0][0])


def _median_of(implementation: str, rivals: Rivals) -> Cell:
    found = next(((row, speed) for row, speed in reversed(rivals) if row.implementation == implementation), None)
    return replace(number(found[0].median_us, 1), style=MEDIAN_STYLES.get(found[1], "")) if found else words(None)


def fastest_table(run: RecordedRun) -> Table:
    """Make a table of medians, with one row per scenario and one column per implementation."""
    names = sorted({row.implementation for row in run.gpu_rows})
    columns: Columns = {
        "scenario": _of_fastest(GPU_COLUMNS["scenario"]),
        "floor, µs": _of_fastest(GPU_COLUMNS["floor, µs"]),
        "fastest": lambda rivals: words(", ".join(row.implementation for row, speed in rivals if speed is Speed.SAME)),
        "time over floor": _of_fastest(GPU_COLUMNS["time over floor"]),
        **{f"{each}, µs": partial(_median_of, each) for each in names},
        **{heading: _of_fastest(cell) for heading, cell in SETTINGS.items()},
    }
    caption = "Implementations side by side, medians; the samples of a scenario are interleaved"
    return make_table(columns, run.rivals if len(names) > 1 else [], name="fastest", caption=caption, say_once=SETTINGS)


def methods(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row.timed_by, str(row.facts.get("method") or "no method recorded")) for row in rows))


def ceiling_table(run: RecordedRun) -> Table:
    """Make a table of the highest rates of memory and matrix units: those measured in the run, and those of the datasheet."""
    dtype = f" ({run.ceilings['matrix_dtype']})" if run.ceilings.get("matrix_dtype") else ""
    rates = {"memory, GB/s": "bandwidth_gbps", f"matrix units, TFLOP/s{dtype}": "matrix_rate_tflops"}
    columns: Columns = {
        "ceiling": lambda item: words(item[0]),
        "measured in this run": lambda item: number(run.ceilings.get(item[1]), 0),
        "datasheet": lambda item: number(run.ceilings.get(f"datasheet_{item[1]}"), 0),
    }
    caption = f"Ceilings; datasheet: {run.ceilings.get('datasheet_source') or 'none'}"
    known = [item for item in rates.items() if run.ceilings.get(item[1]) or run.ceilings.get(f"datasheet_{item[1]}")]
    return make_table(columns, known, name="ceilings", caption=caption, say_once=())
