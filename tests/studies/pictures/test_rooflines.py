"""Floors and clocks, drawn: what the artists hold is what was handed in."""

from typing import Any

from lab.reports.recorded import Row
from studies.pictures.rooflines import FloorParts, bound_figure, clocks_figure
from tests.reports.pictures.figures import assert_legible, marks, words

PARTS = [FloorParts(1, 10.0, 2.0), FloorParts(4, 11.0, 8.0), FloorParts(8, 12.0, 16.0), FloorParts(32, 14.0, 64.0)]
BOUND_WORDS = "the matrix units are the limit"
THROTTLED = {"throttled_by": ["thermal limit"]}


def timed(implementation: str, median_us: float, **facts: Any) -> Row:
    return Row("decode", (median_us,), {"implementation": f"lab.kernels.{implementation}"} | facts)


def test_the_floor_is_the_upper_line_shaded_where_the_matrix_units_are_the_limit() -> None:
    figure = bound_figure(PARTS, "a title", "query tokens")
    (axes,) = figure.axes
    lines = {each.get_label(): each for each in axes.lines}
    for label, expected in (
        ("floor: the longer of the two", [10.0, 11.0, 16.0, 64.0]),
        ("bytes over the bandwidth", [10.0, 11.0, 12.0, 14.0]),
        ("operations over the matrix rate", [2.0, 8.0, 16.0, 64.0]),
    ):
        assert list(lines[label].get_xdata()) == [1, 4, 8, 32]
        assert list(lines[label].get_ydata()) == expected
    assert [patch.get_x() for patch in axes.patches if patch.get_label() == BOUND_WORDS] == [8]
    assert BOUND_WORDS not in words(bound_figure(PARTS[:2], "a title", "query tokens"))
    assert_legible(figure)


def test_marks_are_where_they_were_measured() -> None:
    rows = [(1, timed("one", 15.0)), (8, timed("other", 30.0)), (8, timed("one", 20.0, **THROTTLED))]
    figure = bound_figure(PARTS, "a title", "query tokens", rows)
    (axes,) = figure.axes
    assert marks(axes) == [(1, 15.0), (8, 20.0), (8, 30.0)]
    one, throttled, other = (each for each in axes.lines if len(each.get_xdata()) == 1)
    assert [each.get_markerfacecolor() == "none" for each in (one, throttled, other)] == [False, True, False]
    assert one.get_color() == throttled.get_color() != other.get_color()
    assert {"measured: one", "measured: other", "measured, throttled"} <= set(words(figure))
    assert "measured, throttled" not in words(bound_figure(PARTS, "a title", "query tokens", rows[:2]))
    assert_legible(figure)


def test_clocks_are_ratios_to_one_of_them() -> None:
    readings = {
        "short": {"graph": 2.0, "cupti": 3.0, "events": 12.0},
        "long": {"graph": 100.0, "cupti": None, "events": 110.0},
    }
    figure = clocks_figure(readings, "graph", "a title")
    (axes,) = figure.axes
    assert marks(axes) == [(1.5, 0), (6.0, 0), (1.1, 1)]
    assert {"short: 2.0 µs", "long: 100.0 µs", "cupti", "events"} <= set(words(figure))
    assert "graph" not in words(figure)
