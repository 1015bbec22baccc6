"""Record the rows of a study's points in a JSON file, which is rewritten after each point, and make tables of them."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

import torch
from rich.progress import track

from lab.files import write_text
from lab.provenance import environment
from lab.reports.tables import Cell, Table, make_table, terminal
from lab.timing.roofline import Ceilings

AnyPoint = TypeVar("AnyPoint")
StudyRow = dict[str, Any]
RecordedRow = Mapping[str, Any]  # of a list in a file
Recorded = Mapping[str, Any]  # all that a file holds
# By heading, what a column shows of a row: a format of the row's values, such as "{us:.1f}", or a cell.
Formats = Mapping[str, str | Callable[[Any], Cell]]


class Recording:
    """The rows that a study records, and the file that holds them.

    Args:
        study: the study's name.
        out: path of the JSON file; None writes no file.
        facts: facts about all points, such as the method; they follow the environment in the file.
        lists: names of the lists that points add their rows to.
        derived: computes further facts from all recorded rows; called after every point.
        ceilings: the GPU's ceilings, recorded as part of the environment.
    """

    def __init__(
        self,
        study: str,
        out: Path | None,
        facts: Mapping[str, Any],
        lists: Sequence[str],
        derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda result: {},
        ceilings: Ceilings | None = None,
    ) -> None:
        measured_on = environment() | ({} if ceilings is None else {"ceilings": ceilings.facts()})
        empty: dict[str, Any] = {name: [] for name in lists}
        self.result = {"experiment": study, "environment": measured_on, **facts, **empty}
        self.console = terminal()
        self._out = out
        self._derived = derived

    def measure(
        self,
        points: Collection[AnyPoint],
        rows_at: Callable[[AnyPoint], Mapping[str, Sequence[StudyRow]]],
        what: str = "points",
    ) -> None:
        """Measure point after point; see `studies.study.Part`."""
        for point in track(points, description=what, console=self.console):
            for name, rows in rows_at(point).items():
                self.result[name] += rows
            self.result |= self._derived(self.result)
            if self._out is not None:
                write_text(self._out, json.dumps(self.result, indent=1) + "\n")
            torch.cuda.empty_cache()  # points differ in size, and what one leaves in pieces is of no use to the next


def table_of(caption: str, formats: Formats, rows: Iterable[Mapping[str, Any]]) -> Table:
    """Make a table of one line per row."""
    columns = {head: partial(_cell, shown) if isinstance(shown, str) else shown for head, shown in formats.items()}
    return make_table(columns, list(rows), caption=caption, say_once=())


def _cell(shown: str, row: Mapping[str, Any]) -> Cell:
    names = [name for _, name, _, _ in Formatter().parse(shown) if name]
    value = Formatter().get_field(names[0], (), row)[0] if len(names) == 1 else None
    return Cell(shown.format_map(row), value if isinstance(value, int | float) else None)


def rows_by_point(
    rows: Iterable[Mapping[str, Any]], point: Sequence[str], variant: str
) -> dict[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    """Return rows by the values of the keys that name a point, and at each point by the value of the key `variant`."""
    points: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        points.setdefault(tuple(row[name] for name in point), {})[row[variant]] = row
    return points
