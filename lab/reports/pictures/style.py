"""Parts that the lab's pictures share: figures, axes of cells, bars, labels, legends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

DOTS_PER_INCH = 150  # half as many again as are shown
# Told apart by people who see fewer colours: Okabe and Ito, "Color Universal Design", 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
TEXT_COLOUR = "#333333"
FONT_POINTS = 8.5
WIDTH_INCHES = 8.0  # legible where it is shown 800 pixels wide
HATCH = "////"  # of what was timed while the GPU's clocks were held back


@dataclass(frozen=True)
class Drawing:
    """A picture that the page shows of an experiment's recording.

    A module of `lab.reports.pictures` that has an experiment's name lists them as `DRAWINGS`, and the page finds them.

    Attributes:
        key: of the value in the recording that is drawn.
        words: say what the figure shows.
        draw: makes the figure of the value and a title; raises ValueError, with the reason, if the value is not enough.
    """

    key: str
    words: str
    draw: Callable[[Any, str], Figure]


def new_figure(title: str, height_inches: float) -> Figure:
    """Make a figure with a title and a layout that leaves room for labels; without pyplot, which would keep it for ever."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_POINTS + 1.5, color=TEXT_COLOUR)
    return figure


Grid = Literal["both", "x", "y"] | None


def one_panel(title: str, height_inches: float, grid: Grid = "both") -> tuple[Figure, Axes]:
    """Make a figure with a title and one `plain` panel."""
    figure = new_figure(title, height_inches)
    axes = figure.add_subplot()
    plain(axes, grid)
    return figure, axes


def plain(axes: Axes, grid: Grid = "both") -> None:
    """Draw a light grid of lines at the ticks of both axes or one, beneath all else, and no frame where there is no axis."""
    if grid is not None:
        axes.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def name_axes(axes: Axes, across: str = "", upwards: str = "") -> None:
    """Write what the axes stand for, with units."""
    axes.set_xlabel(across, fontsize=FONT_POINTS)
    axes.set_ylabel(upwards, fontsize=FONT_POINTS)


def name_lines(axes: Axes, names: Sequence[str], fontsize: float | None = FONT_POINTS) -> None:
    """Name the lines of a chart, at y = 0, 1, 2 and so on, from the top; None for matplotlib's own size of letters."""
    axes.set_yticks(range(len(names)), names, fontsize=fontsize)
    axes.set_ylim(len(names) - 0.5, -0.5)


def logarithmic(axes: Axes, names: str) -> None:
    """Make axes logarithmic, "x", "y" or "xy", with numbers as people write them: 1,000 rather than 10³."""
    axes.set(**{f"{name}scale": "log" for name in names})
    for name in names:
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.10g}"))


def legend_below(figure: Figure, keys: Sequence[Artist], columns: int, **style: float) -> None:
    """Add one legend below all that is drawn."""
    look: dict[str, Any] = {"fontsize": FONT_POINTS}
    figure.legend(handles=list(keys), loc="outside lower center", ncols=columns, frameon=False, **look | style)


def fill(colour: str, throttled: bool) -> dict[str, Any]:
    """Return the look of a bar: hatched if it was timed while the GPU's clocks were held back."""
    return {"facecolor": "white" if throttled else colour, "edgecolor": colour, "hatch": HATCH if throttled else None}


def line_key(words: str, colour: str, marker: str = "", **look: Any) -> Line2D:
    """Return the legend's key of a line with markers."""
    common: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4, "label": words}
    return Line2D([], [], **common | look)


def mark_key(words: str, marker: str, **look: Any) -> Line2D:
    """Return the legend's key of a mark without a line."""
    common: dict[str, Any] = {"marker": marker, "color": TEXT_COLOUR, "linestyle": "none", "label": words}
    return Line2D([], [], **common | look)


def write_after(axes: Axes, end: tuple[float, float], words: str, *, gap: float = 3, **style: Any) -> None:
    """Write words after the end of a horizontal bar; `gap` in points."""
    look: dict[str, Any] = {"va": "center", "fontsize": FONT_POINTS}
    axes.annotate(words, end, (gap, 0), textcoords="offset points", **look | style)
