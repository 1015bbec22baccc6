"""The roofline and the chart of time over floor: what the artists hold is what was handed in."""

from typing import Any

import pytest

from lab.reports.pictures.timings import floor_figure, roofline_figure
from lab.reports.recorded import Row
from tests.reports.pictures.figures import assert_legible, words


def timed(implementation: str, median_us: float, **facts: Any) -> Row:
    return Row("decode", (median_us,), {"implementation": f"lab.kernels.{implementation}"} | facts)


@pytest.mark.parametrize(
    "points", [[(100.0, 300.0), (240.0, 500.0)], [(4.0, 17.0), (2000.0, 600.0)]], ids=["short", "long"]
)
def test_a_roofline_has_plain_numbers_however_short_its_axes_are(points: list[Any]) -> None:
    rows = [
        timed("trtllm", 2.0, mode="decode", operations=2e6 * rate, bytes_moved=2e6 * rate / intensity)
        for intensity, rate in points
    ]
    ceilings = {"bandwidth_gbps": 4252.0, "matrix_rate_tflops": 800.0, "matrix_dtype": "bfloat16"}
    figure = roofline_figure(rows, "a title", ceilings)
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in figure.axes[0].lines[: len(rows)]] == points
    assert {"100", "200", "500"} <= set(words(figure))
    assert not any("times" in word for word in words(figure))  # as in 2 × 10²
    assert_legible(figure)


def test_time_over_floor_has_a_mark_per_row_and_the_number_of_the_fastest() -> None:
    times_us = {"portable": (30.0, 12.0), "trtllm": (10.0, 18.0)}
    rows = [
        Row(scenario, (median_us,), {"scenario": scenario, "implementation": name, "floor_us": 8.0})
        for name, both in times_us.items()
        for scenario, median_us in zip(("decode", "extend"), both, strict=True)
    ]
    unbounded = Row("other", (5.0,), {"scenario": "other", "implementation": "portable"})
    figure = floor_figure([*rows, unbounded], "a title")
    (axes,) = figure.axes
    marks = [line for line in axes.lines if line.get_marker() not in ("None", "")]
    assert [(mark.get_xdata()[0], mark.get_ydata()[0]) for mark in marks] == [
        (3.75, 0),
        (1.25, 0),
        (1.5, 1),
        (2.25, 1),
    ]
    spans = [list(line.get_xdata()) for line in axes.lines if line.get_marker() in ("None", "")]
    assert [each for each in spans if each != [1, 1]] == [[1.25, 3.75], [1.5, 2.25]]
    assert len({mark.get_color() for mark in marks}) == len({mark.get_marker() for mark in marks}) == 2
    assert [label.get_text() for label in axes.get_yticklabels()] == ["decode", "extend"]
    assert {"1.25", "1.50"} <= set(words(figure))
    assert not {"3.75", "2.25"} & set(words(figure))
    assert axes.get_xlim()[0] < 1
    assert axes.get_xlim()[1] == pytest.approx(1.3 * 3.75)
    assert_legible(figure)


def test_eight_implementations_have_eight_colours() -> None:
    rows = [timed(f"peer_{place}", 2.0, mode="decode", operations=2e8, bytes_moved=2e6) for place in range(8)]
    (axes,) = roofline_figure(rows, "a title", {}).axes
    assert len({line.get_color() for line in axes.lines[: len(rows)]}) == len(rows)
