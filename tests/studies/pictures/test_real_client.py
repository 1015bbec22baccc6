"""What is drawn of an engine's calls: a mark for each call, by verdict, and the counts above them."""

from typing import Any

from studies.pictures.real_client import calls_figure
from tests.reports.pictures.figures import assert_legible, words


def call(attention: str, step: int, layer: int, keys: int, verdict: str) -> dict[str, Any]:
    return {"attention": attention, "step": step, "layer": layer, "max_kv_len": keys, "verdict": verdict}


CALLS = [
    call("right.kernel", 0, 0, 100, ""),
    call("right.kernel", 0, 1, 100, "right"),
    call("wrong.kernel", 0, 0, 100, "right"),
    call("wrong.kernel", 0, 1, 100, "wrong"),
    call("wrong.kernel", 3, 0, 700, "wrong"),
]


def test_each_call_is_a_mark_at_its_step_and_its_longest_request() -> None:
    figure = calls_figure(CALLS, "calls")
    marks = {
        line.get_gid(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for axes in figure.axes
        for line in axes.lines
    }
    assert marks == {
        "right.kernel ": [(0, 100)],
        "right.kernel right": [(0.5, 100)],
        "right.kernel wrong": [],
        "wrong.kernel ": [],
        "wrong.kernel right": [(0, 100)],
        "wrong.kernel wrong": [(0.5, 100), (3, 700)],
    }
    said = words(figure)
    assert "right.kernel: 0 wrong of 1 judged calls" in said
    assert "wrong.kernel: 2 wrong of 3 judged calls" in said
    assert {"not judged", "judged right", "judged wrong, and kept"} <= {*said}
    assert_legible(figure)
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert low == 0
        assert high > 700
