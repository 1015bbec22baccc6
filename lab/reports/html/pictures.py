"""Figures as data URIs, and the pictures of a recorded experiment."""

import io
from base64 import b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from lab.reports.pictures.style import Drawing
from lab.reports.recorded import RecordedFile

# A fixed salt for ids makes the bytes of a figure the same on any machine. Text as paths looks the same with any fonts.
SVG_SETTINGS: Any = {"svg.hashsalt": "lab", "svg.fonttype": "path"}


@dataclass(frozen=True)
class Picture:
    """A figure as a data URI, and a description of it for people who do not see it."""

    uri: str
    description: str


def picture_of(figure: Figure, description: str) -> Picture:
    """Return a figure as an SVG picture with a transparent background."""
    drawn = io.BytesIO()
    with rc_context(SVG_SETTINGS):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    return Picture(f"data:image/svg+xml;base64,{b64encode(drawn.getvalue()).decode()}", description)


def pictures_of(file: RecordedFile, drawings: Iterable[Drawing]) -> Iterator[Picture | str]:
    """Yield each drawing of a recorded experiment; for one that cannot be drawn, a sentence with the reason."""
    measured_on = ", ".join(str(file.fact(name)) for name in ("gpu", "commit") if file.fact(name))
    for drawing in drawings:
        title = f"{drawing.words}: {measured_on}" if measured_on else drawing.words
        if file.content.get(drawing.key) == []:
            yield f"{drawing.words}: {drawing.key} has no row"
            continue
        try:
            yield picture_of(drawing.draw(file.content[drawing.key], title), drawing.words)
        except KeyError as error:
            yield f"{drawing.words}: the file has no {error}"
        except ValueError as error:
            yield f"{drawing.words}: {error}"
