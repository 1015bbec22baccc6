"""The picture of caches' errors: what the lines hold is what was handed in."""

from lab.reports.budget import budget_figure
from tests.reports.pictures.figures import assert_legible, curves, words


def test_a_panel_has_the_errors_of_one_cache_and_a_colour_for_each_kind_of_values() -> None:
    rows = [
        {"kv": kv, "values": values, "keys": keys, "quantisation": 1e-2 * weight, "kernel": 2e-3, "bound": 1e-2}
        for weight, (kv, values) in enumerate((kv, values) for kv in ("bf16", "e4m3") for values in ("normal", "heavy"))
        for keys in (1024, 2**20)
    ]
    rows = [row | {"quantisation": row["quantisation"] + 1e-3} for row in rows]
    figure = budget_figure(rows, "a title")
    first, second = figure.axes
    assert curves(first)[0] == [(1024, 1e-3), (2**20, 1e-3)]
    assert curves(second)[3] == [(1024, 3.1e-2), (2**20, 3.1e-2)]
    assert curves(second)[4] == [(1024, 2e-3), (2**20, 2e-3)]
    assert len(first.lines) == len(second.lines) == 6
    assert len({line.get_color() for line in first.lines}) == 2
    assert {"bf16", "e4m3", "1K", "1M", "quantisation, normal", "bound, heavy"} <= set(words(figure))
    assert_legible(figure)
