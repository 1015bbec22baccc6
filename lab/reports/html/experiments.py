"""Recorded experiments as parts of the page: pictures, the facts that hold for a whole file, and a table per list of rows."""

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.experiments import EXPERIMENTS
from lab.reports.html.pictures import Picture, pictures_of
from lab.reports.recorded import RecordedFile
from lab.reports.tables import Table, flattened, table_of_records

SHOWN_ELSEWHERE = ("environment",)  # keys of a file; the page has one table of all files' environments


@dataclass(frozen=True)
class ExperimentPart:
    """The page's part of one recorded experiment. Keys are those of the file; "outer.inner" for a mapping in a mapping.

    Attributes:
        name: of the file.
        question: the first paragraph of the docstring of the experiment's module; "" if there is no such module.
        facts: (key, text) of each value that is not a list of rows.
        tables: one per list of rows.
        empty: keys of the lists without a row.
        pictures: of the recorded values.
        undrawn: a sentence for each picture that could not be drawn, with the reason.
    """

    name: str
    question: str
    facts: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]
    empty: tuple[str, ...]
    pictures: tuple[Picture, ...]
    undrawn: tuple[str, ...]


def experiment_part(file: RecordedFile) -> ExperimentPart:
    """Return the page's part of a file of `Kind.EXPERIMENT`: a mapping of facts and of lists of rows, under any keys."""
    shown = {key: value for key, value in file.content.items() if key not in SHOWN_ELSEWHERE}
    lists = {key: value for key, value in shown.items() if isinstance(value, list)}
    rows = {key: value for key, value in lists.items() if value and all(isinstance(row, Mapping) for row in value)}
    facts = flattened({key: value for key, value in shown.items() if key not in rows and value != []})
    drawn = list(pictures_of(file))
    return ExperimentPart(
        name=file.name,
        question=_question(file.experiment),
        facts=tuple(
            (key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)) for key, value in facts.items()
        ),
        tables=tuple(
            table_of_records(f"{file.name.replace('/', '-')}-{key}", f"{file.name}: {key}", value)
            for key, value in rows.items()
        ),
        empty=tuple(key for key, value in lists.items() if not value),
        pictures=tuple(each for each in drawn if isinstance(each, Picture)),
        undrawn=tuple(each for each in drawn if isinstance(each, str)),
    )


def _question(name: str) -> str:
    """Return the question that an experiment's module begins with; "" without such a module.

    The module is read and not imported, because some modules import packages that the page does not need.
    """
    spec = importlib.util.find_spec(EXPERIMENTS[name]) if name in EXPERIMENTS else None
    if spec is None or spec.origin is None:
        return ""
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return docstring.split("\n\n", 1)[0].replace("\n", " ")
