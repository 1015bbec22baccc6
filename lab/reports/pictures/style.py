"""Define what all pictures of the lab share: figures, panels, lanes, bars, labels, ticks and legends."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from lab.reports.tables import in_short

DOTS_PER_INCH = 150  # 1.5 times the shown resolution
# Colours that colour-blind readers can distinguish: Okabe and Ito, "Color Universal Design", 2008; grey for their yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
TEXT_COLOUR = "#333333"
FONT_POINTS = 8.5
WIDTH_INCHES = 8.0  # legible where it is shown 800 pixels wide
HATCH = "////"  # marks times that were measured while the GPU throttled its clocks

LINE: dict[str, Any] = {"markersize": 4, "linewidth": 1.4}  # look of measured times
FLOOR: dict[str, Any] = {"linestyle": "--", "color": TEXT_COLOUR, "linewidth": 1.2}


@dataclass(frozen=True)
class Drawing:
    """A picture of a recorded experiment on the HTML page. Modules of `studies.pictures` list their pictures as `DRAWINGS`."""

    key: str  #: key of the drawn value in the recorded file
    words: str  #: description of the picture
    #: makes the figure from the value and a title; raises ValueError with the reason if the value lacks data
    draw: Callable[[Any, str], Figure]


Grid = Literal["both", "x", "y"] | None


def panels(
    title: str,
    height_inches: float,
    lines: int = 1,
    columns: int = 1,
    *,
    grid: Grid = "both",
    log: str = "",
    width_inches: float = WIDTH_INCHES,
) -> tuple[Figure, NDArray[Any]]:
    """Make a figure with a title and a grid of panels. Return the figure, and the panels' `Axes` as an array [lines, columns].

    `grid` names the axes with grid lines. `log` names the logarithmic axes: "x", "y", "xy" or "".
    """
    figure = Figure(figsize=(width_inches, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_POINTS + 1.5, color=TEXT_COLOUR)
    drawn = figure.subplots(lines, columns, sharex="col", sharey=True, squeeze=False)
    for axes in drawn.flat:
        if grid is not None:
            axes.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=FONT_POINTS - 0.5)
        axes.set(**{f"{name}scale": "log" for name in log})
        for name in log:  # write 1,000 rather than 10³
            getattr(axes, f"{name}axis").set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.10g}"))
    return figure, drawn


def one_panel(title: str, height_inches: float, **more: Any) -> tuple[Figure, Axes]:
    figure, drawn = panels(title, height_inches, **more)
    return figure, drawn[0, 0]


def lane_panels(
    title: str, names: Iterable[str], lanes: Sequence[str], end: float, across: str
) -> tuple[Figure, list[Axes]]:
    """Make a figure with one panel per name. Each panel has one horizontal lane per entry of `lanes`, the first at the top. The
    x axes go from 0 to `end`, and `across` is their label.
    """
    listed = list(names)
    figure, drawn = panels(title, 1.1 + 1.15 * len(listed), len(listed), grid="x")
    for axes, name in zip(drawn[:, 0], listed, strict=True):
        name_panel(axes, name, loc="left")
        axes.set(xlim=(0, end), ylim=(len(lanes) - 0.1, -0.1))
        axes.set_yticks([lane + 0.4 for lane in range(len(lanes))], lanes)
    name_axes(drawn[-1, 0], across)
    return figure, list(drawn[:, 0])


def draw_span(axes: Axes, lane: int, start: float, end: float, **look: Any) -> None:
    axes.add_patch(Rectangle((start, lane), end - start, 0.8, **look))


def name_panel(axes: Axes, words: str, **more: Any) -> None:
    axes.set_title(words, fontsize=FONT_POINTS + 0.5, color=TEXT_COLOUR, **more)


def name_axes(axes: Axes, across: str = "", upwards: str = "") -> None:
    axes.set_xlabel(across, fontsize=FONT_POINTS)
    axes.set_ylabel(upwards, fontsize=FONT_POINTS)


def name_lines(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=FONT_POINTS)
    axes.set_ylim(len(names) - 0.5, -0.5)


def mark_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """Put the ticks of the x axis at these sizes, with labels such as "4K"."""
    axes.set_xticks(sizes, [in_short(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())


def few_ticks(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, columns: int, keys: Iterable[Artist] | None = None, *more: Artist) -> None:
    """Add a legend below the panels, with the entries `keys` (None: all labels in the panels) and `more`."""
    if keys is None:
        labelled: dict[str, Artist] = {}
        for axes in figure.axes:
            for key, words in zip(*axes.get_legend_handles_labels(), strict=True):
                labelled.setdefault(words, key)
        keys = labelled.values()
    figure.legend(
        handles=[*keys, *more], loc="outside lower center", ncols=columns, frameon=False, fontsize=FONT_POINTS
    )


def assigned(names: Sequence[str], looks: Sequence[str]) -> dict[str, str]:
    return {name: looks[index % len(looks)] for index, name in enumerate(dict.fromkeys(names))}


def fill(colour: str, throttled: bool) -> dict[str, Any]:
    return {"facecolor": "white" if throttled else colour, "edgecolor": colour, "hatch": HATCH if throttled else None}


def mark_key(words: str, marker: str, **look: Any) -> Line2D:
    common: dict[str, Any] = {"marker": marker, "color": TEXT_COLOUR, "linestyle": "none", "label": words}
    return Line2D([], [], **common | look)


def write_after(axes: Axes, end: tuple[float, float], words: str, *, gap: float = 3, **style: Any) -> None:
    look: dict[str, Any] = {"va": "center", "fontsize": FONT_POINTS}
    axes.annotate(words, end, (gap, 0), textcoords="offset points", **look | style)
