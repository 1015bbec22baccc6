"""What is drawn of draft extend's two calls: cells and lines, held against the rows handed in."""

from typing import Any

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from studies.pictures.draft_extend_kernels import (
    CONTEXT_COLOUR,
    DECODE_COLOUR,
    crossover_figure,
    floor_share_figure,
    point_figure,
)
from tests.reports.pictures.figures import by_gid, curves, words


def a_row(variant: str, requests: int, kv_len: int, q_len: int, median_us: float) -> dict[str, Any]:
    return {
        "arm": variant,
        "kernel": f"{variant} kernel",
        "requests": requests,
        "kv_len": kv_len,
        "q_len": q_len,
        "median_us": median_us,
        "floor_us": 2.0 * q_len,
    }


# (requests, keys, query rows): decode and context time. 4 requests of 4,096 keys were measured with 1 row alone.
TIMES = {
    (1, 1024, 1): (10.0, 100.0),
    (4, 1024, 1): (10.0, 30.0),
    (1, 4096, 1): (10.0, 20.0),
    (4, 4096, 1): (10.0, 15.0),
    (1, 1024, 8): (40.0, 38.0),
    (4, 1024, 8): (40.0, 20.0),
    (1, 4096, 8): (40.0, 40.0),
}
SOME_ROWS = [
    a_row(variant, *point, time)
    for point, times in TIMES.items()
    for variant, time in zip(("decode", "context"), times, strict=True)
]


def cells(figure: Figure) -> dict[str, tuple[int, int, str]]:
    """Column, line and text of each cell, by its gid."""
    (axes,) = figure.axes
    texts = {tuple(map(int, text.get_position())): text.get_text() for text in axes.texts}
    places = {gid: (int(patch.get_x()), int(patch.get_y())) for gid, patch in by_gid(figure).items()}
    return {gid: (*place, texts[place]) for gid, place in places.items()}


def test_a_cell_is_the_ratio_of_the_calls_and_says_which_is_faster() -> None:
    figure = crossover_figure(SOME_ROWS, "map")
    assert cells(figure) == {
        "1 1024 1": (0, 1, "10"),
        "4 1024 1": (0, 2, "3.0"),
        "1 4096 1": (1, 1, "2.0"),
        "4 4096 1": (1, 2, "1.5"),
        "1 1024 8": (3, 1, "0.95"),
        "4 1024 8": (3, 2, "0.50"),
        "1 4096 8": (4, 1, "1.0"),
    }
    (axes,) = figure.axes
    assert [(int(patch.get_x()), int(patch.get_y())) for patch in axes.patches if patch.get_hatch()] == [(4, 2)]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1K", "4K"] * 2
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1 request", "4 requests"]
    assert {"1 query row per request", "8 query rows per request", "keys per request"} <= set(words(figure))
    assert by_gid(figure)["1 1024 1"].get_facecolor() == to_rgba(DECODE_COLOUR)
    assert by_gid(figure)["4 1024 8"].get_facecolor() == to_rgba(CONTEXT_COLOUR)
    framed = {patch.get_gid() for patch in axes.patches if patch.get_edgecolor() == to_rgba("black")}
    assert framed == {"1 1024 8", "4 1024 8"}  # ratios 0.95 and 0.50, not that of exactly 1


def test_shares_are_floors_over_times() -> None:
    shares = {
        f"{variant} {' '.join(map(str, point))}": f"{100 * 2 * point[2] / time:.0f}"
        for point, times in TIMES.items()
        for variant, time in zip(("decode", "context"), times, strict=True)
    }
    found = cells(floor_share_figure(SOME_ROWS, "shares", q_lens=(1, 8)))
    assert {gid: text for gid, (*_, text) in found.items()} == shares


def test_cuts_run_through_the_point() -> None:
    portable = a_row("portable decode", 1, 1024, 1, 12.0)
    figure = point_figure([*SOME_ROWS, portable], "cuts", 1, 1024, 1)
    over_rows, over_keys = figure.axes
    assert curves(over_rows) == [
        [(1, 10), (8, 40)],
        [(1, 100), (8, 38)],
        [(1, 12)],
        [(1, 2), (8, 16)],
        [(1, 0), (1, 1)],  # the point's own place
    ]
    assert curves(over_keys)[:2] == [[(1024, 10), (4096, 10)], [(1024, 100), (4096, 20)]]
    assert (over_rows.get_title(), over_keys.get_title()) == ("1 request, 1K keys", "1 request, 1 query row")
    assert {"decode: decode kernel", "context: context kernel", "floor"} <= set(words(figure))
