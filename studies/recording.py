"""Types of recorded rows, and tables of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from string import Formatter
from typing import Any

from lab.reports.tables import Cell, Table, make_table

StudyRow = dict[str, Any]
RecordedRow = Mapping[str, Any]  # of a list in a file
Recorded = Mapping[str, Any]  # all that a file holds
# By heading, what a column shows of a row: a format of the row's values, such as "{us:.1f}", or a cell.
Formats = Mapping[str, str | Callable[[Any], Cell]]


def table_of(caption: str, formats: Formats, rows: Iterable[Mapping[str, Any]]) -> Table:
    columns = {head: partial(_cell, shown) if isinstance(shown, str) else shown for head, shown in formats.items()}
    return make_table(columns, list(rows), caption=caption, say_once=())


def _cell(shown: str, row: Mapping[str, Any]) -> Cell:
    names = [name for _, name, _, _ in Formatter().parse(shown) if name]
    value = Formatter().get_field(names[0], (), row)[0] if len(names) == 1 else None
    return Cell(shown.format_map(row), value if isinstance(value, int | float) else None)


def rows_by_point(
    rows: Iterable[Mapping[str, Any]], point: Sequence[str], variant: str
) -> dict[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    """Return for each point (the values of the keys `point`) its rows, by the value of their key `variant`."""
    points: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        points.setdefault(tuple(row[name] for name in point), {})[row[variant]] = row
    return points
