"""Recorded benchmarks as tables: GPU time beside its floor, host time, and times without a clock."""

from collections.abc import Callable
from typing import Any

from lab.reports.html.tables import Cell, Table, make_table, number, words
from lab.reports.recorded import RecordedRun, Row
from lab.reports.timings import LEAST_FLOOR_US, MODULE_PREFIX

Columns = dict[str, Callable[[Row], Cell]]


def timing_tables(run: RecordedRun, name: str) -> list[Table]:
    """GPU time, host time, and what no stated clock took: never in one table, since they are not comparable.

    Args:
        name: what the tables' ids begin with.
    """
    host = [row for row in run.other_rows if row.facts.get("clock") == "host"]
    unknown = [row for row in run.other_rows if row.facts.get("clock") != "host"]
    tables = [
        make_table(f"{name}-gpu", "GPU time", GPU_COLUMNS, sorted(run.gpu_rows, key=lambda row: row.identity)),
        make_table(f"{name}-host", "Host time: not GPU time, and not comparable with it", PLAIN_COLUMNS, host),
        make_table(f"{name}-unknown", "Times without a recorded clock: compared with nothing", PLAIN_COLUMNS, unknown),
    ]
    return [table for table in tables if table.rows]


def methods(run: RecordedRun) -> dict[str, str]:
    """What each label of "timed by" stands for."""
    return {row.timed_by: str(row.facts.get("method") or "no method recorded") for row in run.gpu_rows}


def ceiling_table(run: RecordedRun, name: str) -> Table:
    """What the GPU reached in this run, and what its vendor states."""
    ceilings = run.ceilings
    matrix = f"matrix units, TFLOP/s ({ceilings.matrix_dtype})" if ceilings.matrix_dtype else "matrix units, TFLOP/s"
    lines = [
        ("memory, GB/s", ceilings.bandwidth_gbps, ceilings.datasheet_bandwidth_gbps),
        (matrix, ceilings.matrix_rate_tflops, ceilings.datasheet_matrix_rate_tflops),
    ]
    columns: dict[str, Callable[[Any], Cell]] = {
        "ceiling": lambda line: words(line[0]),
        "measured in this run": lambda line: number(line[1], 0),
        "datasheet": lambda line: number(line[2], 0),
    }
    known = [line for line in lines if any(line[1:])]
    return make_table(f"{name}-ceilings", f"Ceilings; datasheet: {ceilings.datasheet_source or 'none'}", columns, known)


def _fact(key: str, digits: int, scale: float = 1.0) -> Callable[[Row], Cell]:
    return lambda row: number(row.facts.get(key), digits, scale)


def _word(key: str) -> Callable[[Row], Cell]:
    return lambda row: words(row.facts.get(key))


def _over_floor(row: Row) -> Cell:
    floor_us = row.facts.get("floor_us") or 0.0
    return number(row.median_us / floor_us if floor_us >= LEAST_FLOOR_US else None, 2)


GPU_COLUMNS: Columns = {
    "scenario": lambda row: words(row.scenario),
    "implementation": lambda row: words(str(row.facts.get("implementation", "")).removeprefix(MODULE_PREFIX)),
    "kernel": _word("kernel"),
    "median, µs": lambda row: number(row.median_us, 2),
    "floor, µs": _fact("floor_us", 2),
    "time over floor": _over_floor,
    "bound by": _word("floor_bound"),
    "timed by": lambda row: words(row.timed_by),
    "held back by": lambda row: words(", ".join(row.throttled_by)),
    "IQR, %": lambda row: number(row.iqr_percent, 1),
    "GB/s": _fact("bandwidth_gbps", 0),
    "% of memory": _fact("bandwidth_percent", 0),
    "TFLOP/s": _fact("rate_tflops", 1),
    "% of matrix": _fact("matrix_rate_percent", 0),
    "mode": _word("mode"),
    "page size": _fact("page_size", 0),
    "dtype": _word("dtype"),
    "K/V dtype": _word("kv_dtype"),
    "requests": _fact("requests", 0),
    "query tokens": _fact("query_tokens", 0),
    "keys": _fact("kv_tokens", 0),
    "MB": _fact("bytes_moved", 1, 1e-6),
    "GFLOP": _fact("operations", 1, 1e-9),
    "launches": _fact("launches", 0),
    "host, µs": _fact("host_us", 1),
}
PLAIN_COLUMNS: Columns = {
    "benchmark": lambda row: words(row.name),
    "median, µs": lambda row: number(row.median_us, 2),
    "IQR, %": lambda row: number(row.iqr_percent, 1),
    "samples": lambda row: number(len(row.samples_us)),
    "method": _word("method"),
}
