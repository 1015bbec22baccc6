"""Figures as data URIs, and the register of the figures that show a recorded experiment."""

import io
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from lab.reports.pictures.draft_extend_graph import forms_figure
from lab.reports.pictures.draft_extend_kernels import crossover_figure
from lab.reports.pictures.draft_steps import claim_figure, draft_times_figure
from lab.reports.pictures.length_copy import arms_figure
from lab.reports.recorded import RecordedFile

# The same figure gives the same bytes on any machine.
SVG_SETTINGS: Any = {"svg.hashsalt": "lab", "svg.fonttype": "path"}
Drawing = Callable[[Any, str], Figure]
# By the name of the experiment: the key of what is drawn, what the figure shows, and what draws it.
DRAWINGS: Mapping[str, tuple[tuple[str, str, Drawing], ...]] = {
    "draft_steps": (
        ("pr_26241", "What skipping the lists saves per draft", claim_figure),
        ("rows", "GPU time of one draft's metadata", draft_times_figure),
    ),
    "draft_extend_kernels": (("rows", "Time of the context call over the decode call's", crossover_figure),),
    "draft_extend_graph": (("forms", "GPU time of a draft extend, by what it hands out", forms_figure),),
    "length_copy": (("arms", "The GPU's time of a step", arms_figure),),
}


@dataclass(frozen=True)
class Picture:
    """A figure as a data URI, and what it shows in words."""

    uri: str
    words: str


def picture_of(figure: Figure, description: str) -> Picture:
    """Return a figure as SVG, its letters as paths: it looks the same with any fonts."""
    drawn = io.BytesIO()
    with rc_context(SVG_SETTINGS):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return Picture(f"data:image/svg+xml;base64,{b64encode(drawn.getvalue()).decode()}", description)


def pictures_of(file: RecordedFile) -> Iterator[Picture | str]:
    """Draw an experiment's pictures; in place of one that its rows are not enough for, the reason."""
    for key, description, draw in DRAWINGS.get(file.experiment, ()):
        measured_on = ", ".join(str(file.fact(name)) for name in ("gpu", "commit") if file.fact(name))
        title = f"{description}: {measured_on}" if measured_on else description
        try:
            yield picture_of(draw(file.content[key], title), description)
        except KeyError as error:
            yield f"{description}, for want of {error} in the file"
        except ValueError as error:
            yield f"{description}: {error}"
