"""The picture of page tables: every cell is what the table and the lengths say."""

import torch
from matplotlib.colors import to_rgba

from studies.pictures.forward_modes import PAGE_KINDS, pages_figure
from tests.reports.pictures.figures import assert_legible, rectangles, words

TABLES = torch.tensor([[4, 1, 9], [4, 2, 5], [7, 8, 7], [1, 0, 0]])
LENGTHS = torch.tensor([20, 40, 0, 5])  # of pages of 16; the last page of the first request is shared with the last one


def test_each_cell_has_its_page_and_its_kind() -> None:
    figure = pages_figure(TABLES, LENGTHS, 16, "the pages")
    assert_legible(figure)
    colours = {to_rgba(look.face): kind for kind, look in PAGE_KINDS.items()}
    boxes = sorted(rectangles(figure), key=lambda box: (box.get_y(), box.get_x()))
    kinds = [colours[to_rgba(each.get_facecolor())] for each in boxes]
    assert kinds == [
        *("shared", "shared", "dead"),
        *("shared", "own", "last"),
        *("dead", "dead", "dead"),
        *("shared", "dead", "dead"),
    ]
    said = words(figure)
    assert {"request 0: 20 keys", "request 2: 0 keys", "9", "8"} <= set(said)
