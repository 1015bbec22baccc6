"""What the lab's pictures have in common."""

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

DOTS_PER_INCH = 150  # half as many again as are shown
# Told apart by people who see fewer colours: Okabe and Ito, "Color Universal Design", 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
TEXT_COLOUR = "#333333"
FONT_POINTS = 8.5


def plain(axes: Axes) -> None:
    """A light grid behind what is drawn, and no frame where there is no axis."""
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def logarithmic(axes: Axes, names: str) -> None:
    """Logarithmic axes, "x", "y" or "xy", with numbers as people write them: 1,000 rather than 10³."""
    axes.set(**{f"{name}scale": "log" for name in names})
    for name in names:
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.10g}"))


def legend_below(figure: Figure, keys: Sequence[Artist], columns: int, font_points: float = FONT_POINTS) -> None:
    """One legend of a figure, below all that is drawn, for figures with a constrained layout."""
    figure.legend(handles=list(keys), loc="outside lower center", ncols=columns, frameon=False, fontsize=font_points)


def row_label(axes: Axes, line: float, words: str, weight: str = "normal") -> None:
    """Words left of the axes, beside the middle of a line of height 1."""
    axes.annotate(
        words,
        (0, line + 0.5),
        (-6, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=FONT_POINTS,
        weight=weight,
        color=TEXT_COLOUR,
    )
