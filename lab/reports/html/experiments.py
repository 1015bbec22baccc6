"""Recorded experiments as parts of the page: pictures, the facts that hold for a whole file, and a table per list of rows."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points

from lab.reports.html.pictures import Picture, pictures_of
from lab.reports.pictures.style import Drawing
from lab.reports.recorded import RecordedFile
from lab.reports.tables import Table, flattened, table_of_records

SHOWN_ELSEWHERE = ("environment",)  # keys of a file; the page has one table of all files' environments


@dataclass(frozen=True)
class ExperimentPart:
    """The page's part of one recorded experiment. Keys are those of the file; "outer.inner" for a mapping in a mapping.

    Attributes:
        name: of the file.
        question: that the experiment answers; "" where the package that recorded it is not installed.
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
    question, drawings = _question_and_drawings(file.experiment)
    drawn = list(pictures_of(file, drawings))
    return ExperimentPart(
        name=file.name,
        question=question,
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


def _question_and_drawings(experiment: str) -> tuple[str, Sequence[Drawing]]:
    """Return the question and the drawings of an experiment; ("", ()) where its package is not installed."""
    for found in entry_points(group="lab.page"):
        with suppress(ModuleNotFoundError):
            return found.load()(experiment)
    return "", ()
