"""Show the results of `lab.budget`: a table and a picture of errors, or the answer whether a failed test shows a bug."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lab.budget import LARGEST, Explanation, Setting
from lab.exit_status import ExitStatus
from lab.provenance import environment
from lab.reports.tables import Cell, Columns, TableReport, in_short, make_table, number, words

LOOKS = {"quantisation": "o-", "kernel": "s--", "bound": "^:"}  # of lines in the picture
STATUS = {"noise": ExitStatus.DONE, "bug": ExitStatus.WRONG, "undecided": ExitStatus.NOT_JUDGED}


def budget_report(rows: Sequence[Mapping[str, Any]], atol: float, rtol: float) -> TableReport:
    """Return a table of `lab.budget.budget` results and lines that explain it. `atol` and `rtol` are those of the results."""
    remarks = (
        "medians of relative L2 errors of output vectors:",
        "quantised: float64 on stored K and V against original ones; unavoidable",
        "kernel: a right kernel on stored K and V; given: yours; bound: the judge's",
        f"q %, k %: elements with |got - want| > {atol:g} + {rtol:g} |want|, quantised and kernel",
    )
    record = {"atol": atol, "rtol": rtol, "rows": list(rows), "environment": environment()}
    return TableReport((), make_table(COLUMNS, rows, say_once=()), remarks, record)


def budget_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Plot median relative L2 errors over the number of keys: a panel per cache dtype, a colour per distribution of K and V.
    Needs the extra `plots`.
    """
    from lab.reports.pictures import style

    caches = list(dict.fromkeys(row["kv"] for row in rows))
    colours = style.assigned([row["values"] for row in rows], style.COLOURS)
    figure, panels = style.panels(title, 3.6, columns=len(caches), log="xy")
    for axes, cache in zip(panels[0], caches, strict=True):
        style.name_panel(axes, cache)
        style.name_axes(axes, "keys", "" if cache != caches[0] else "relative L2 error, median")
        style.mark_sizes(axes, sorted({row["keys"] for row in rows}))
        for values, colour in colours.items():
            mine = [row for row in rows if (row["kv"], row["values"]) == (cache, values)]
            for name, look in LOOKS.items():
                points = [row["keys"] for row in mine], [row[name] for row in mine]
                axes.plot(*points, look, color=colour, label=f"{name}, {values}", **style.LINE)
    style.legend_below(figure, len(colours))
    return figure


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
