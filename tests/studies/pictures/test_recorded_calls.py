"""The picture of page tables: every cell is what the table and the lengths say."""

import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from studies.pictures.recorded_calls import LOOKS, MOST_COLUMNS, pages_figure
from tests.reports.pictures.figures import assert_legible, words

TABLES = torch.tensor([[4, 1, 9], [4, 2, 5], [7, 8, 7]])
LENGTHS = torch.tensor([20, 32, 0])  # of pages of 16


def test_each_cell_has_its_page_and_its_kind() -> None:
    figure = pages_figure(TABLES, LENGTHS, 16, "the pages")
    assert_legible(figure)
    axes = figure.axes[0]
    colours = {to_rgba(look.face): kind for kind, look in LOOKS.items()}
    boxes = [each for each in axes.patches if isinstance(each, Rectangle)]
    kinds = [
        colours[to_rgba(each.get_facecolor())] for each in sorted(boxes, key=lambda box: (box.get_y(), box.get_x()))
    ]
    assert kinds == ["shared", "last", "dead", "shared", "own", "dead", "dead", "dead", "dead"]
    said = words(figure)
    assert {"request 0: 20 keys", "request 2: 0 keys", "9", "8"} <= set(said)


def test_a_shared_last_page_is_shown_as_shared() -> None:
    figure = pages_figure(torch.tensor([[3], [3]]), torch.tensor([5, 7]), 16, "the pages")
    faces = {to_rgba(each.get_facecolor()) for each in figure.axes[0].patches if isinstance(each, Rectangle)}
    assert faces == {to_rgba(LOOKS["shared"].face)}


def test_more_columns_than_can_be_read_are_refused() -> None:
    wide = torch.zeros(1, MOST_COLUMNS + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{MOST_COLUMNS + 1} pages side by side"):
        pages_figure(wide, torch.tensor([5]), 16, "the pages")
