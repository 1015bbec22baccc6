"""Prepare recorded experiments for the HTML page: pictures, single values, and a table for each list of rows."""

import io
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from lab.reports.pictures.style import Drawing
from lab.reports.recorded_file import RecordedFile
from lab.reports.tables import flattened, table_of_records

# A fixed salt for ids makes the figure's bytes the same on any machine. Text drawn as paths does not depend on fonts.
SVG_SETTINGS: Any = {"svg.hashsalt": "lab", "svg.fonttype": "path"}


def picture_of(figure: Figure, description: str) -> dict[str, str]:
    """Return {"uri": the figure as an SVG data URI, "description": the description for screen readers}."""
    drawn = io.BytesIO()
    with rc_context(SVG_SETTINGS):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    return {"uri": f"data:image/svg+xml;base64,{b64encode(drawn.getvalue()).decode()}", "description": description}


def experiment_part(file: RecordedFile) -> dict[str, Any]:
    """Return the values with which the page's template shows one recorded experiment."""
    shown = {key: value for key, value in file.content.items() if key != "environment"}
    lists = {key: value for key, value in shown.items() if isinstance(value, list)}
    rows = {key: value for key, value in lists.items() if value and all(isinstance(row, Mapping) for row in value)}
    facts = flattened({key: value for key, value in shown.items() if key not in rows and value != []})
    question, drawings = _question_and_drawings(file.experiment)
    drawn = list(_pictures(file, drawings))
    return {
        "name": file.name,
        "question": question,
        "facts": {
            key: ", ".join(map(str, value)) if isinstance(value, list) else str(value) for key, value in facts.items()
        },
        "tables": [
            table_of_records(f"{file.name.replace('/', '-')}-{key}", f"{file.name}: {key}", value)
            for key, value in rows.items()
        ],
        "empty": [key for key, value in lists.items() if not value],
        "pictures": [each for each in drawn if not isinstance(each, str)],
        "undrawn": [each for each in drawn if isinstance(each, str)],
    }


def _question_and_drawings(experiment: str) -> tuple[str, Sequence[Drawing]]:
    for found in entry_points(group="lab.page"):
        with suppress(ModuleNotFoundError):
            return found.load()(experiment)
    return "", ()


def _pictures(file: RecordedFile, drawings: Iterable[Drawing]) -> Iterator[dict[str, str] | str]:
    """Yield for each drawing the picture, or a sentence that says why it cannot be drawn."""
    measured_on = ", ".join(str(file.fact(name)) for name in ("gpu", "commit") if file.fact(name))
    for drawing in drawings:
        title = f"{drawing.words}: {measured_on}" if measured_on else drawing.words
        if file.content.get(drawing.key) == []:
            yield f"{drawing.words}: {drawing.key} has no row"
            continue
        try:
            yield picture_of(drawing.draw(file.content[drawing.key], title), drawing.words)
        except (KeyError, ValueError) as error:
            yield f"{drawing.words}: {'the file has no ' if isinstance(error, KeyError) else ''}{error}"
