"""What holds for every picture: its words are legible, and data that cannot be drawn so is refused with the reason."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from lab.metadata.speculation.draft_steps import DraftPlan
from studies.pictures.draft_extend_graph import eager_or_graph_figure, forms_figure
from studies.pictures.draft_extend_kernels import crossover_figure, floor_share_figure, point_figure
from studies.pictures.draft_steps import built_figure, claim_figure, draft_times_figure, lists_figure, steps_figure
from studies.pictures.forward_modes import pages_figure
from studies.pictures.judging import matrix_figure
from studies.pictures.length_copy import recorded_excerpt, timeline_figure, variants_figure, verify_mask_figure
from studies.pictures.plan_stream import two_lane_figure
from studies.pictures.real_client import calls_figure
from studies.pictures.rooflines import clocks_figure
from studies.pictures.static_buffers import buffers_figure
from tests.devices import IN_INTERPRETER
from tests.reports.pictures.figures import assert_legible
from tests.studies.pictures.test_draft_extend_graph import FIRST, SECOND, Replays, padded, smaller
from tests.studies.pictures.test_draft_extend_kernels import SOME_ROWS
from tests.studies.pictures.test_draft_steps import built
from tests.studies.pictures.test_forward_modes import PASSES, a_pass, drawn
from tests.studies.pictures.test_judging import RECORDS
from tests.studies.pictures.test_length_copy import ARM, TIMELINE, VARIANTS, masks
from tests.studies.pictures.test_plan_stream import EVENTS
from tests.studies.recorded import recorded

KERNELS, STEPS = recorded("draft_extend_kernels")["rows"], recorded("draft_steps")
GRAPH, CLOCKS = recorded("draft_extend_graph"), recorded("clocks")["rows_us"]
CLOCK_NAMES = ("graph warm", "cupti warm", "graph cold by rotation", "cupti cold by flush", "events warm")


def of_mode(mode: str) -> Figure:
    rows = [row for row in GRAPH["modes"] if row["mode"] == mode and row["arm"] != "load"]
    return eager_or_graph_figure(rows, "a title")


def of_loop(gpu_us: float, host_us: float) -> Figure:
    variants = [row for row in VARIANTS if (row["gpu_us"], row["host_us"]) == (gpu_us, host_us)]
    return timeline_figure([recorded_excerpt(row) for row in variants], "Three steps")


def of_width(width: int) -> Figure:
    return buffers_figure(Replays(width).buffers_after(FIRST, SECOND), "a title")


def of_steps(num_steps: int) -> Figure:
    return built_figure(*built(num_steps=num_steps), "What the common template makes")


def readings() -> dict[str, dict[str, float | None]]:
    return {row["work"]: {name: row[name] for name in CLOCK_NAMES} for row in CLOCKS}


def of_timeline(timeline: list[Any]) -> Figure:
    return timeline_figure([recorded_excerpt(ARM | {"timeline": timeline})], "lacks something")


def without(name: str, value: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row[name] != value]


TITLE = "Draft extend V2: time of the context call over that of the decode call"
DRAWN: dict[str, Callable[[], Figure]] = {
    "buffers, padded": lambda: buffers_figure(padded(), TITLE),
    "buffers, smaller": lambda: buffers_figure(smaller(), TITLE),
    "buffers, widest": partial(of_width, 6),
    "both calls": partial(crossover_figure, KERNELS, TITLE),
    "both calls, floors": partial(floor_share_figure, KERNELS, TITLE),
    "both calls, cuts": partial(point_figure, KERNELS, TITLE, 16, 4096, 4),
    "clocks": lambda: clocks_figure(readings(), "graph warm", TITLE),
    "draft, claim": partial(claim_figure, STEPS["pr_26241"], TITLE),
    "draft, lists": partial(lists_figure, STEPS["rows"], TITLE),
    "draft, steps": partial(steps_figure, STEPS["rows"], TITLE, requests=64, tokens=8192),
    "draft, times": partial(draft_times_figure, STEPS["rows"], TITLE),
    **{f"draft, {steps} steps built": partial(of_steps, steps) for steps in (2, 8)},
    "graph, forms": partial(forms_figure, GRAPH["forms"], TITLE),
    **{f"graph, {mode}": partial(of_mode, mode) for mode in {row["mode"]: 0 for row in GRAPH["modes"]}},
    "loops": partial(variants_figure, VARIANTS, TITLE),
    **{f"loop {sizes}": partial(of_loop, *sizes) for sizes in {(row["gpu_us"], row["host_us"]): 0 for row in VARIANTS}},
    "mutants": partial(matrix_figure, RECORDS * 20, [f"K{number}" for number in range(1, 22)], ["rule"] * 10),
    **{f"pass, {name}": lambda name=name: drawn(a_pass(name)) for name in PASSES},
}
NOT_DRAWN: dict[str, Callable[[], Figure]] = {
    "28 query rows side by side, more than 24": partial(of_width, 7),
    r"'kv_len': 4096, 'q_len': 8.*kv_len \[1024, 4096\]": partial(point_figure, SOME_ROWS, TITLE, 4, 4096, 8),
    "no recorded point has both calls": partial(crossover_figure, without("arm", "context", SOME_ROWS), TITLE),
    "no recorded point of the decode call has 3 query rows": partial(floor_share_figure, SOME_ROWS, TITLE, (3,)),
    "no ragged lists": lambda: built_figure(*built(plan=DraftPlan.PER_STEP), TITLE),
    "41 slots side by side, more than 40": lambda: built_figure(*built((17, 17)), TITLE),
    "no recorded row has 7 steps": partial(draft_times_figure, STEPS["rows"], TITLE, num_steps=7),
    "no recorded row has kernel 'mla one_launch'": partial(
        draft_times_figure, without("kernel", "mla one_launch", STEPS["rows"]), TITLE
    ),
    "no recorded row has 5 requests of 10 tokens": partial(steps_figure, STEPS["rows"], TITLE, requests=5, tokens=10),
    "44 slots side by side, more than 40": lambda: drawn(a_pass("decode", prefix_lens=(40,), q_lens=(1,))),
    "2 steps and 3 GPU activities, expected equally many": partial(of_timeline, TIMELINE[:-1]),
    "0 steps and 4 GPU activities, expected equally many": partial(of_timeline, TIMELINE[4:]),
    "2 steps and 0 GPU activities, expected equally many": partial(of_timeline, TIMELINE[:3]),
    "45 columns side by side, more than 44": lambda: verify_mask_figure(masks((20, 18)), (20, 18), TITLE),
    "no timeline": partial(two_lane_figure, {}, TITLE),
    "is empty": partial(two_lane_figure, {"one": EVENTS}, TITLE, (50.0, 50.0)),
    "has no calls": partial(calls_figure, [], TITLE),
    "25 pages side by side": partial(pages_figure, torch.zeros(1, 25).int(), torch.tensor([5]), 16, TITLE),
    "long has no time by cupti": partial(clocks_figure, {"long": {"graph": 100.0, "cupti": None}}, "cupti", TITLE),
}


@IN_INTERPRETER
@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_no_words_overlap_or_leave_the_picture(draw: Callable[[], Figure]) -> None:
    assert_legible(draw())


@IN_INTERPRETER
@pytest.mark.parametrize("message", NOT_DRAWN)
def test_what_cannot_be_drawn_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NOT_DRAWN[message]()
