"""Show the results of `lab.budget`: a table of errors, or the answer whether a failed test shows a bug."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lab.budget import LARGEST, Explanation, Setting
from lab.exit_status import ExitStatus
from lab.provenance import environment
from lab.reports.tables import Cell, Columns, TableReport, in_short, make_table, number, words

STATUS = {"noise": ExitStatus.DONE, "bug": ExitStatus.WRONG, "undecided": ExitStatus.NOT_JUDGED}


def budget_report(rows: Sequence[Mapping[str, Any]], atol: float, rtol: float) -> TableReport:
    """Return a table with one row per result of `lab.budget.budget`, followed by lines that explain its columns."""
    remarks = (
        "medians of relative L2 errors of output vectors:",
        "quantised: float64 on stored K and V against original ones; unavoidable",
        "kernel: a right kernel on stored K and V; given: yours; bound: the judge's",
        f"q %, k %: elements with |got - want| > {atol:g} + {rtol:g} |want|, quantised and kernel",
    )
    record = {"atol": atol, "rtol": rtol, "rows": list(rows), "environment": environment()}
    return TableReport((), make_table(COLUMNS, rows, say_once=()), remarks, record)


def answer_report(answer: Explanation, setting: Setting, asked: Mapping[str, Any]) -> TableReport:
    """Return a report that says whether a failed test is noise or a bug, and why. Its JSON has the test's numbers (`asked`)."""
    record = {"verdict": answer.verdict, "reason": answer.reason, **answer.numbers, "asked": dict(asked)}
    below = f"simulated: {setting}", f"{answer.verdict}: {answer.reason}"
    return TableReport((), make_table({}, ()), below, record, STATUS[answer.verdict])


def _error(name: str, row: Mapping[str, Any]) -> Cell:
    return Cell(f"{row[name]:.2g}", row[name]) if name in row else words(None)


COLUMNS: Columns = {
    "cache": lambda row: words(row["kv"]),
    "scale": lambda row: words(row["scale"] if row["kv"] in LARGEST else None),
    "values": lambda row: words(row["values"]),
    "keys": lambda row: Cell(in_short(row["keys"]), row["keys"]),
    "quantised": partial(_error, "quantisation"),
    **{name: partial(_error, name) for name in ("kernel", "given", "bound")},
    "q %": lambda row: number(row["quantisation_over"], 2, 100),
    "k %": lambda row: number(row["kernel_over"], 2, 100),
}
