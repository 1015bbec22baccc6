"""The run of an experiment: on a GPU or not at all, point by point, its JSON file written anew after each."""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lab.exit_status import ExitStatus
from lab.files import write_text
from lab.provenance import environment
from lab.timing.roofline import Ceilings

WIDTH_WITHOUT_TERMINAL = 200

Point = TypeVar("Point")
Row = dict[str, Any]
# By header, what a column shows of a row: a format of the row's values, such as "{us:.1f}", or a function.
Columns = Mapping[str, str | Callable[[Mapping[str, Any]], str]]


class Recording:
    """The rows that an experiment records, and the file that holds them.

    Args:
        experiment: its name.
        out: where the JSON goes; None keeps no file.
        facts: what holds of all points, such as the method. The environment stands before them. A function is no fact: what it
            makes of all that is recorded is computed anew after every point.
        lists: names of the lists that points add their rows to.
        ceilings: go into the environment.
    """

    def __init__(
        self,
        experiment: str,
        out: Path | None,
        facts: Mapping[str, Any],
        lists: Sequence[str],
        *,
        ceilings: Ceilings | None = None,
    ) -> None:
        measured_on = environment() | ({} if ceilings is None else {"ceilings": ceilings.facts()})
        self.result: dict[str, Any] = {
            "experiment": experiment,
            "environment": measured_on,
            **{name: fact for name, fact in facts.items() if not callable(fact)},
            **{name: [] for name in lists},
        }
        self.console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)
        self._out = out
        self._derived = {name: fact for name, fact in facts.items() if callable(fact)}

    def measure(
        self, points: Collection[Point], rows_at: Callable[[Point], Mapping[str, Sequence[Row]]], what: str = "points"
    ) -> None:
        """Measure point after point, and write the file anew after each.

        Args:
            points: what `rows_at` takes.
            rows_at: measures one; gives rows by the name of the list that they go to.
            what: the points, for the progress bar.
        """
        for point in track(points, description=what, console=self.console):
            for name, rows in rows_at(point).items():
                self.result[name] += rows
            self.result |= {name: of(self.result) for name, of in self._derived.items()}
            self._write()
            torch.cuda.empty_cache()  # points differ in size, and what one leaves in pieces is of no use to the next

    def add(self, name: str, value: object) -> None:
        """Record one thing more."""
        self.result[name] = value
        self._write()

    def _write(self) -> None:
        if self._out is not None:
            write_text(self._out, json.dumps(self.result, indent=1) + "\n")

    def print_table(self, title: str, columns: Columns, rows: str, *, words: Collection[str] = ()) -> None:
        """Print a line per row of a list; see `table_of`."""
        self.console.print(table_of(title, columns, self.result[rows], words=words))

    def print_reasons(self) -> None:
        """Print the reasons of the arms that have no time."""
        for outcome in ("declined", "wrong"):
            for row in self.result[outcome]:
                self.console.print(f"{outcome}: {row['point']}, {row['arm']}: {row['reason']}", markup=False)

    @property
    def exit_status(self) -> ExitStatus:
        """Return that of the experiment's command: WRONG if the output of an arm was."""
        return ExitStatus.WRONG if self.result.get("wrong") else ExitStatus.DONE


def table_of(title: str, columns: Columns, rows: Iterable[Mapping[str, Any]], *, words: Collection[str] = ()) -> Table:
    """Draw one line per row; the columns named in `words` are text, all others numbers."""
    table = Table(title=title, title_justify="left")
    for header in columns:
        table.add_column(header, justify="left" if header in words else "right")
    cells = [cell.format_map if isinstance(cell, str) else cell for cell in columns.values()]
    for row in rows:
        table.add_row(*(cell(row) for cell in cells))
    return table


def rows_by_point(
    rows: Iterable[Mapping[str, Any]], point: Sequence[str], arm: str
) -> dict[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    """Return the rows by the values of the keys that name a point, and at each point by that of the key that names an arm."""
    points: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        points.setdefault(tuple(row[name] for name in point), {})[row[arm]] = row
    return points
