"""The tables at the end of a benchmark run."""

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from lab.checks import CaseVerdict, ForwardCase
from lab.reports.recorded import Row
from lab.reports.tables import Columns, Table, grouped, make_table, number, terminal_of, words
from lab.reports.timing_tables import GPU_COLUMNS
from lab.timing import Ceilings

# Wide enough for every column; a narrow terminal wraps lines, and a log file does not care.
WIDTH = 220
JUDGED: Columns = {
    "mode": lambda verdict: words(_mode_name(verdict.case)),
    "implementation": lambda verdict: words(verdict.implementation),
    "geometry": lambda verdict: words(verdict.case.geometry),
    "verdict": lambda verdict: words(verdict.outcome.value),
    "% of the bound": lambda verdict: number(100 * verdict.judged.worst_ratio, 0),
}


def judged_table(verdicts: Sequence[CaseVerdict], where: str) -> str:
    return _drawn(make_table(JUDGED, verdicts, caption=f"Judged, {where}", say_once=()))


def _mode_name(case: ForwardCase) -> str:
    name = case.mode.name.lower().replace("_", " ")
    if case.draft_step is not None:
        name = f"draft decode, step {case.draft_step}"
    return f"{name}, sliding window" if case.sliding_window else name


def timed_tables(rows: Sequence[dict[str, Any]], ceilings: Ceilings) -> str:
    """Return every timed row next to the rates of the GPU in this run: a table per method, and what held the GPU back."""
    timed = grouped((row["method"], Row(row["scenario"], tuple(row["samples_us"]), row)) for row in rows)
    tables = [_drawn(make_table(GPU_COLUMNS, each, caption=f"GPU time: {method}")) for method, each in timed.items()]
    return "\n".join([*tables, _measured(ceilings)])


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
    console.print(terminal_of(table))
    notes = "".join(f"{heading}: {text}\n" for heading, text in table.common)
    return notes + console.file.getvalue().rstrip()
