"""What is drawn of the plan stream: rectangles where the events are, differences of medians, and causes beside effects."""

from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from studies.pictures.plan_stream import (
    OTHER,
    PHASES,
    dependence_figure,
    draft_to_verify_us,
    saved_figure,
    savings_of_overlap,
    two_lane_figure,
)
from tests.reports.pictures.figures import assert_legible, gids, rectangles, words
from tests.studies.recorded import recorded

RECORDED = recorded("plan_stream")


def event(stream: str, phase: str | None, start_us: float, duration_us: float) -> dict[str, Any]:
    return {"stream": stream, "phase": phase, "name": "kernel", "start_us": start_us, "duration_us": duration_us}


EVENTS = [
    event("forward", "inputs", 0.0, 2.0),
    event("forward", "draft", 3.0, 20.0),
    event("plan", "plan", 4.0, 5.0),
    event("forward", "draft", 24.0, 16.0),
    event("forward", "fix-up", 41.0, 3.0),
    event("forward", "verify", 50.0, 30.0),
    event("forward", "verify", 81.0, 100.0),
    event("forward", None, 300.0, 1.0),
]


def test_a_kernel_is_where_it_ran() -> None:
    figure = two_lane_figure({"one": EVENTS}, "a title")
    drawn = [(patch.get_gid(), *patch.get_xy(), patch.get_width()) for patch in rectangles(figure)]
    assert drawn == [
        ("forward inputs", 0.0, 0, 2.0),
        ("forward draft", 3.0, 0, 20.0),
        ("plan plan", 4.0, 1, 5.0),
        ("forward draft", 24.0, 0, 16.0),
        ("forward fix-up", 41.0, 0, 3.0),
        ("forward verify", 50.0, 0, 30.0),
        ("forward verify", 81.0, 0, 100.0),  # runs out of the picture, which ends at 110
    ]
    assert figure.axes[0].get_xlim() == (0.0, 110.0)
    colours = {patch.get_gid().split()[1]: to_hex(patch.get_facecolor()).upper() for patch in rectangles(figure)}
    assert colours == PHASES
    assert "10.0 µs from draft to verify" in words(figure)
    assert [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_linestyle() == ":"] == [40.0, 50.0]


def test_a_window_shows_what_is_in_it() -> None:
    figure = two_lane_figure({"one": EVENTS}, "a title", (23.5, 45.0))
    assert [patch.get_gid() for patch in rectangles(figure)] == ["forward draft", "forward fix-up"]
    assert {"draft", "fix-up"} <= set(words(figure))
    assert not {"inputs", "plan", "verify"} & set(words(figure))
    late = two_lane_figure({"one": EVENTS}, "a title", (250.0, 400.0))
    assert [to_hex(patch.get_facecolor()).upper() for patch in rectangles(late)] == [OTHER]


def test_recorded_iterations_are_legible_and_agree_with_their_medians() -> None:
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    for variant in RECORDED["arms"]:
        kinds.setdefault((variant["drafts"], variant["builder"], variant["draft_us"]), {})[variant["start"]] = variant
    for variants in kinds.values():
        assert_legible(two_lane_figure({start: variant["timeline"] for start, variant in variants.items()}, "a title"))
        for variant in variants.values():
            ended, started = draft_to_verify_us(variant["timeline"])
            medians = variant["medians"]
            assert started - ended == pytest.approx(medians["between_us"], rel=0.25)
            assert sum(each["phase"] == "plan" for each in variant["timeline"]) == medians["plan_launches"]


def test_savings_are_bars_with_a_dot_per_round() -> None:
    saved = savings_of_overlap(RECORDED["arms"])
    arms = {(row["drafts"], row["builder"], row["draft_us"], row["start"]): row for row in RECORDED["arms"]}
    for each, kind in zip(saved, dict.fromkeys(key[:3] for key in arms), strict=True):
        pair = [arms[(*kind, start)] for start in ("in line", "after the inputs")]
        assert each.name == "{}, {}, draft of {:g} µs".format(*kind)
        assert each.traced_us == -np.diff([row["medians"]["iteration_us"] for row in pair])
        traced = [[np.median([step["iteration_us"] for step in run]) for run in row["runs"]] for row in pair]
        assert each.traced_rounds_us == tuple(np.subtract(*traced))
        untraced = [row["unprofiled_iteration_us"] for row in pair]
        assert each.untraced_us == -np.diff(np.median(untraced, axis=1))
        assert each.untraced_rounds_us == tuple(np.subtract(*untraced))
    figure = saved_figure(saved, "a title")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in rectangles(figure)] == [
        value for each in saved for value in (each.traced_us, each.untraced_us)
    ]
    dots = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [list(rounds) for each in saved for rounds in (each.traced_rounds_us, each.untraced_rounds_us)]
    assert {f"{each.untraced_us:+,.1f} µs" for each in saved} <= set(words(figure))
    assert_legible(figure)


def test_a_table_of_causes() -> None:
    changed = {
        "lengths": {"cache_seqlens": True, "cu_seqlens_q": False, "mask": False},
        "the draft's tree": {"cache_seqlens": False, "cu_seqlens_q": False, "mask": True},
    }
    known = {"lengths": "known before", "the draft's tree": "known after the draft"}
    figure = dependence_figure(changed, "a title", known)
    assert gids(figure) == {
        f"{'changes' if changes else 'same'} {cause}/{tensor}"
        for cause, tensors in changed.items()
        for tensor, changes in tensors.items()
    }
    assert "the draft's tree (known after the draft)" in words(figure)
    assert words(figure).count("changes") == 2
    assert_legible(figure)
