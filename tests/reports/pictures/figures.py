"""What tests ask of any picture."""

from itertools import combinations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text


def words(figure: Figure) -> list[str]:
    """All lines that are written in a picture, invisible text left out."""
    return [line for text in _texts(figure) for line in text.get_text().splitlines()]


def rectangles(figure: Figure) -> list[Rectangle]:
    """Bars and cells of all panels, as they were drawn."""
    return [patch for axes in figure.axes for patch in axes.patches if isinstance(patch, Rectangle)]


def by_gid(figure: Figure) -> dict[str, Rectangle]:
    """The bars and cells that have a name, each once."""
    found = [(each.get_gid(), each) for each in rectangles(figure) if each.get_gid()]
    assert len(found) == len(dict(found))
    return dict(found)


def gids(figure: Figure) -> set[str]:
    return set(by_gid(figure))


def curves(axes: Axes) -> list[list[tuple[float, float]]]:
    """The points of each line."""
    return [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines]


def marks(axes: Axes) -> list[tuple[float, float]]:
    """The points that stand alone, in the order of their drawing."""
    return [curve[0] for curve in curves(axes) if len(curve) == 1]


def assert_legible(figure: Figure) -> None:
    """No words overlap others or leave the picture."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in _texts(figure)]
    width, height = figure.get_size_inches() * figure.dpi
    for said, box in boxes:
        assert box.x0 >= 0, said
        assert box.x1 <= width, said
        assert box.y0 >= 0, said
        assert box.y1 <= height, said
    for (said, box), (other, other_box) in combinations(boxes, 2):
        assert not box.overlaps(other_box), (said, other)


def _texts(figure: Figure) -> list[Text]:
    figure.draw_without_rendering()  # tick labels are there only then
    ticks_out_of_sight = {
        label
        for axes in figure.axes
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim()))
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not min(limits) <= tick.get_loc() <= max(limits) or not label.get_visible()
    }
    return [
        text
        for text in figure.findobj(Text)
        if text.get_text() and text.get_visible() and text not in ticks_out_of_sight
    ]
