"""Draw pictures of labelled lines of cells. Each picture's own function makes the lines from its data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lab.reports.pictures import style

LINE_INCHES = 0.21
WORDS_POINTS = 7.0


@dataclass(frozen=True)
class Look:
    """The style of a kind of cell.

    Attributes:
        edge: colour of the border; without one ("none"), cells touch.
        meaning: the legend's words for the kind; "" leaves it out of the legend.
        hatch: hatching of the inside, so that important kinds can be distinguished without colours.
        ink: colour of the words in a cell.
    """

    face: str
    meaning: str = ""
    edge: str = "white"
    hatch: str | None = None
    linestyle: str = "-"
    ink: str = "black"

    @property
    def key(self) -> Patch:
        return Patch(fc=self.face, ec=self.edge, hatch=self.hatch, ls=self.linestyle, lw=0.8, label=self.meaning)


@dataclass(frozen=True)
class Box:
    """A cell of a line: its left edge, its kind, the words in its middle, its width, and the gid of its `Rectangle`."""

    x: float
    kind: Any
    words: str = ""
    width: float = 1
    gid: str | None = None


@dataclass(frozen=True)
class Ruler:
    """A horizontal line with marked ends that begins at `start`, and words after it."""

    start: float
    length: float
    words: str = ""
    colour: str = "black"


@dataclass(frozen=True)
class Line:
    """A line of a picture: a label on the left, cells and rulers; or a heading. `dot` is the x coordinate of a mark."""

    label: str = ""
    cells: Sequence[Box] = ()
    rulers: Sequence[Ruler] = ()
    heading: str = ""
    dot: float | None = None


def check_legible(count: int, unit: str, most: int, advice: str) -> None:
    if count > most:
        raise ValueError(
            f"{count} {unit} side by side, more than {most}, which is as many as can be read side by side: {advice}"
        )


def cells_figure(
    title: str,
    lines: Sequence[Line],
    kinds: Mapping[Any, Look],
    columns: tuple[float, float],
    *,
    subtitle: str = "",
    across: Mapping[float, str] | None = None,
    rotation: float = 0,
    square: bool = False,
    dot: str = "",
) -> Figure:
    """Draw lines from top to bottom, and a legend of the kinds of cells that occur.

    Args:
        columns: the first and the last x.
        across: words above the lines, by the x of their middle. `rotation` turns them, in degrees.
        square: cells are as wide as high.
        dot: the legend's words for dots.
    """
    names = across or {}
    across_inches = max(0.055 * max(map(len, names.values())) if rotation else 0, 0.2) if names else 0
    words_inches = 0.17 * (subtitle.count("\n") + bool(subtitle)) + across_inches
    figure, axes = style.one_panel(title, 0.9 + words_inches + LINE_INCHES * len(lines), grid=None)
    axes.set(xlim=columns, ylim=(len(lines), 0))
    axes.spines[:].set_visible(False)
    axes.xaxis.tick_top()
    turned: dict[str, Any] = {"rotation": rotation, "ha": "left", "rotation_mode": "anchor"} if rotation else {}
    axes.set_xticks(list(names), list(names.values()), **turned)
    labels = {y + 0.5: line.label for y, line in enumerate(lines) if line.label}
    axes.set_yticks(list(labels), list(labels.values()))
    axes.tick_params(length=0, labelsize=style.FONT_POINTS - 0.5, labelcolor=style.TEXT_COLOUR)
    axes.set_title(subtitle, loc="left", fontsize=style.FONT_POINTS - 0.5, color=style.TEXT_COLOUR)
    if square:
        axes.set_aspect("equal", anchor="NW")
    for y, line in enumerate(lines):
        _draw_line(axes, y, line, kinds)
    there = {cell.kind for line in lines for cell in line.cells}
    keys: list[Artist] = [kind.key for name, kind in kinds.items() if name in there and kind.meaning]
    if any(line.dot is not None for line in lines):
        keys.append(style.mark_key(dot, "o", color="black", markersize=4))
    style.legend_below(figure, 3, keys)
    return figure


def _draw_line(axes: Axes, y: int, line: Line, kinds: Mapping[Any, Look]) -> None:
    middle: dict[str, Any] = {"y": y + 0.53, "va": "center"}
    axes.text(axes.get_xlim()[0], s=line.heading, weight="bold", fontsize=style.FONT_POINTS, **middle)
    for cell in line.cells:
        kind = kinds[cell.kind]
        look: dict[str, Any] = {"fc": kind.face, "ec": kind.edge, "hatch": kind.hatch, "ls": kind.linestyle}
        gap = 0 if kind.edge == "none" else 0.03
        corner = cell.x + gap, y + 0.06
        axes.add_patch(Rectangle(corner, cell.width - 2 * gap, 0.88, lw=0.8, gid=cell.gid, **look))
        if cell.words:
            backing = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if kind.hatch else None
            look = {"ha": "center", "fontsize": WORDS_POINTS, "color": kind.ink, "bbox": backing}
            axes.text(cell.x + cell.width / 2, s=cell.words, **look, **middle)
    for ruler in line.rulers:
        ends = [ruler.start, ruler.start + ruler.length]
        axes.plot(ends, [y + 0.5] * 2, "|-", color=ruler.colour, linewidth=1.8, markersize=9, clip_on=False)
        axes.text(ends[1] + 0.35, s=ruler.words, fontsize=WORDS_POINTS, **middle)
    if line.dot is not None:
        axes.plot(line.dot, y + 0.5, "o", color="black", markersize=4)
