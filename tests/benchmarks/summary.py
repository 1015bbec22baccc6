"""The tables at the end of a benchmark run."""

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.checks import CaseVerdict, ForwardCase
from lab.timing import Ceilings

# Wide enough for every column; a narrow terminal wraps lines, and a log file does not care.
WIDTH = 220


def judged_table(verdicts: Sequence[CaseVerdict], where: str) -> str:
    table = Table(title=f"Judged, {where}", title_justify="left")
    for column in ("mode", "implementation", "geometry", "verdict", "of the allowed"):
        table.add_column(column)
    for verdict in verdicts:
        table.add_row(
            _mode_name(verdict.case),
            verdict.implementation,
            verdict.case.geometry,
            verdict.outcome.value,
            f"{verdict.judged.worst_ratio:.0%}",
        )
    return _drawn(table)


def _mode_name(case: ForwardCase) -> str:
    name = case.mode.name.lower().replace("_", " ")
    if case.draft_step is not None:
        name = f"draft decode, step {case.draft_step}"
    return f"{name}, sliding window" if case.sliding_window else name


# Column header, the fact it shows, how.
COLUMNS = (
    ("scenario", "scenario", "{}"),
    ("kernel", "kernel", "{}"),
    ("median µs", "median_us", "{:,.1f}"),
    ("IQR µs", "iqr_us", "{:,.2f}"),
    ("floor µs", "floor_us", "{:,.1f}"),
    ("bound", "floor_bound", "{}"),
    ("floor / median %", "floor_percent", "{:.0f}"),
    ("GB/s", "bandwidth_gbps", "{:,.0f}"),
    ("% of GB/s", "bandwidth_percent", "{:.0f}"),
    ("TFLOP/s", "rate_tflops", "{:,.1f}"),
    ("% of TFLOP/s", "matrix_rate_percent", "{:.1f}"),
    ("MB", "bytes_moved", "{:,.1f}"),
    ("GFLOP", "operations", "{:,.1f}"),
    ("launches", "launches", "{}"),
    ("host µs", "host_us", "{:.1f}"),
)
SCALE = {"bytes_moved": 1e-6, "operations": 1e-9}


def timed_tables(rows: Sequence[dict[str, Any]], ceilings: Ceilings) -> str:
    """Every timed row beside what the GPU gave in this run, a table per method, and a warning for each that was held back."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    held_back = [
        f"HELD BACK by {', '.join(row['throttled_by'])}: {row['scenario']}" for row in rows if row["throttled_by"]
    ]
    return "\n".join(
        [*(_timed_table(each, method) for method, each in by_method.items()), _measured(ceilings), *held_back]
    )


def _timed_table(rows: Sequence[dict[str, Any]], method: str) -> str:
    table = Table(title=f"GPU time: {method}", title_justify="left")
    for header, fact, _ in COLUMNS:
        is_text = fact in ("scenario", "kernel", "floor_bound")
        table.add_column(header, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(
            *(form.format(row[fact] * SCALE.get(fact, 1) if fact in SCALE else row[fact]) for _, fact, form in COLUMNS)
        )
    return _drawn(table)


def _measured(ceilings: Ceilings) -> str:
    stated = ceilings.datasheet
    datasheet = (
        "this GPU's datasheet is not known to the lab"
        if stated is None
        else f"{stated.bandwidth_gbps:,.0f} GB/s and {stated.matrix_rate_tflops:,.0f} TFLOP/s ({stated.source})"
    )
    return (
        f"Measured in this run: {ceilings.bandwidth_gbps:,.0f} GB/s read and written by a large elementwise kernel, "
        f"{ceilings.matrix_rate_tflops:,.0f} TFLOP/s by a large bf16 matrix product. Datasheet: {datasheet}. "
        "Percentages are of what was measured here. The floor is the longer of bytes and operations over these rates. "
        "Bytes and operations are those that the actual lengths need."
    )


def _drawn(table: Table) -> str:
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(table)
    return console.file.getvalue().rstrip()
