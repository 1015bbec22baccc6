"""Recorded experiments: the facts that each file says once, and its lists of rows, under the keys of the file."""

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.experiments import EXPERIMENTS
from lab.reports.html.pictures import Picture, pictures_of
from lab.reports.recorded import RecordedFile
from lab.reports.tables import Table, flattened, table_of_records

SAID_ELSEWHERE = ("environment",)  # the page has one table of all files' environments


@dataclass(frozen=True)
class ExperimentPart:
    """One file.

    Attributes:
        name: of the file.
        question: the first line of the experiment's module; "" if there is no module of that name.
        facts: what holds of all its rows, by key.
        tables: its lists of rows.
        empty: lists without a row, by key.
        pictures: of its rows.
        undrawn: reasons why a picture is not there.
    """

    name: str
    question: str
    facts: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]
    empty: tuple[str, ...]
    pictures: tuple[Picture, ...]
    undrawn: tuple[str, ...]


def experiment_of(file: RecordedFile) -> ExperimentPart:
    """Make the page's part of any file of facts and of lists of rows."""
    shown = {key: value for key, value in file.content.items() if key not in SAID_ELSEWHERE}
    lists = {key: value for key, value in shown.items() if isinstance(value, list)}
    rows = {key: value for key, value in lists.items() if value and all(isinstance(row, Mapping) for row in value)}
    facts = flattened({key: value for key, value in shown.items() if key not in rows and value != []})
    drawn = list(pictures_of(file))
    return ExperimentPart(
        name=file.name,
        question=_question(file.experiment),
        facts=tuple((key, _text(value)) for key, value in facts.items()),
        tables=tuple(
            table_of_records(f"{file.name.replace('/', '-')}-{key}", f"{file.name}: {key}", value)
            for key, value in rows.items()
        ),
        empty=tuple(key for key, value in lists.items() if not value),
        pictures=tuple(each for each in drawn if isinstance(each, Picture)),
        undrawn=tuple(each for each in drawn if isinstance(each, str)),
    )


def _question(name: str) -> str:
    """Return the first sentence of the module that wrote the file, read and not imported: some need more than the page does."""
    found = importlib.util.find_spec(EXPERIMENTS[name]) if name in EXPERIMENTS else None
    return "" if found is None or found.origin is None else _first_line(found.origin)


def _first_line(path: str) -> str:
    docstring = ast.get_docstring(ast.parse(Path(path).read_text(encoding="utf-8"))) or ""
    return docstring.split("\n\n", 1)[0].replace("\n", " ")


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
