"""What is said of a change follows its recording: of altered recordings it says what they were altered to."""

from collections.abc import Mapping
from typing import Any

import pytest

from studies.changes import CHANGES
from studies.changes.verdicts import Answer, Aspect, Standing
from tests.studies.recorded import recorded

BY_NUMBER = {change.number: change for change in CHANGES}
Altered = dict[str, Any]


def judged(number: int, *altered: Mapping[str, Any]) -> Answer:
    """The answer of a change's recording, and of the further ones; the real ones where none are given."""
    change = BY_NUMBER[number]
    modules = (change.module, *change.further)
    given = dict(zip(modules, altered, strict=False))
    return change.judge({module: given.get(module) or recorded(module) for module in modules})


def counts(aspect: Aspect) -> tuple[int, int, int]:
    """Points that hold, that do not, and that are undecided."""
    holding, failing, undecided = (aspect.count(standing) for standing in Standing)
    return holding, failing, undecided


def exchange(one: Altered, other: Altered, *names: str) -> None:
    for name in names:
        one[name], other[name] = other[name], one[name]


# --- 24566


def test_a_faster_context_call_contradicts_24566_at_its_point() -> None:
    recording = recorded("draft_extend_kernels")
    rows = {(row["requests"], row["kv_len"], row["q_len"], row["arm"]): row for row in recording["rows"]}
    for (*_, variant), row in rows.items():
        row |= {"median_us": 20.0 if variant == "context" else 10.0, "iqr_us": 1.0}
    exchange(rows[1, 1024, 4, "decode"], rows[1, 1024, 4, "context"], "median_us")
    (found,) = judged(24566, recording).aspects[0].that(Standing.FAILS)
    assert (found.where, found.figures) == ("1 × 1,024 keys, q 4", "10.0 → 20.0 µs")


# --- 25002


def test_a_slower_replay_contradicts_25002() -> None:
    recording = recorded("draft_extend_graph")
    rows = {(row["mode"], row["batch_size"], row["arm"]): row for row in recording["modes"]}
    for (*_, variant), row in rows.items():
        row["completion_us"] = 900.0 if variant == "eager" else 400.0
    exchange(rows["draft_extend_v2", 64, "eager"], rows["draft_extend_v2", 64, "graph"], "completion_us")
    answer = judged(25002, recording)
    assert [each.where for each in answer.aspects[0].that(Standing.FAILS)] == ["draft extend v2, 64 requests"]
    assert answer.verdict == "holds in part"


# --- 25925


def variants_of(recording: Altered) -> dict[tuple[Any, ...], Altered]:
    return {(row["draft_us"], row["drafts"], row["builder"], row["start"]): row for row in recording["arms"]}


def test_a_chain_that_is_mended_contradicts_25925() -> None:
    recording = recorded("plan_stream")
    variants_of(recording)[400.0, "chains", "fused", "after the inputs"]["medians"]["fix_up_launches"] = 3
    mended = judged(25925, recording).aspects[0]
    (found,) = mended.that(Standing.FAILS)
    assert found.where == "chains, fused, a draft of 400 µs, planned after the inputs"
    assert found.figures == "3 launches after the draft"


RUNS, UNPROFILED = "runs", "unprofiled_iteration_us"


@pytest.mark.parametrize(
    ("exchanged", "standing"),
    [
        ((), Standing.HOLDS),
        ((RUNS,), Standing.UNDECIDED),
        ((UNPROFILED,), Standing.UNDECIDED),
        ((RUNS, UNPROFILED), Standing.FAILS),
    ],
)
def test_both_clocks_must_say_that_a_plan_beside_the_draft_pays(exchanged: tuple[str, ...], standing: Standing) -> None:
    recording = recorded("plan_stream")
    variants = variants_of(recording)
    starts = ("in line", "after the inputs")
    in_line, beside = (variants[400.0, "chains", "torch operations", start] for start in starts)
    for variant, time_us in ((in_line, 1500.0), (beside, 1400.0)):
        variant |= {RUNS: [[{"iteration_us": time_us}] * 5], UNPROFILED: [time_us] * 5}
    exchange(in_line, beside, *exchanged)
    found = {each.where: each for each in judged(25925, recording).aspects[1].observations}
    assert found["chains, torch operations, a draft of 400 µs"].standing is standing


# --- 26241


def test_lists_that_cost_nothing_contradict_26241() -> None:
    recording = recorded("draft_steps")
    rows = {row["scenario"]: row for row in recording["rows"]}
    point = "8x8k/steps3"
    for name, row in rows.items():
        row |= {"median_us": 9.0 if "common_template" in name else 3.0, "iqr_us": 0.1}
    exchange(rows[f"draft_steps/mla/common_template/{point}"], rows[f"draft_steps/mla/per_step/{point}"], "median_us")
    skipped = judged(26241, recording).aspects[0]
    assert [each.where for each in skipped.that(Standing.FAILS)] == ["MLA, 8 × 8k, 3 steps"]


@pytest.mark.parametrize(("saved_us", "standing"), [(230.0, Standing.FAILS), (250.0, Standing.HOLDS)])
def test_the_claims_figures_are_held_against_what_is_saved(saved_us: float, standing: Standing) -> None:
    recording = recorded("draft_steps")
    for row in recording["rows"]:
        if row["point"].endswith("x80k/steps3") and "/mla/" in row["scenario"]:
            row["median_us"] = 4.0 + (saved_us if "common_template" in row["scenario"] else 0.0)
    size = judged(26241, recording).aspects[1]
    assert "236.4 µs" in size.statement  # 0.06 ms a token, 3.94 tokens
    assert {each.standing for each in size.observations} == {standing}
    assert len(size.observations) == 6


def test_a_partial_recording_of_26241_lacks_what_it_lacks() -> None:
    recording = recorded("draft_steps")
    recording["rows"] = [row for row in recording["rows"] if row["point"] == "1x1k/steps2"]
    del recording["pr_26241"]
    answer = judged(26241, recording)
    assert [len(aspect.observations) for aspect in answer.aspects] == [3, 0, 0]
    assert answer.aspects[1].verdict == "not recorded"
    assert answer.notes == ()


# --- 26824


def test_a_step_that_still_waits_contradicts_26824() -> None:
    recording = recorded("length_copy")
    row, *others = (row for row in recording["arms"] if row["arm"] == "without the copy")
    for each in others:
        each["medians"]["synchronisations"] = 0
    row["medians"] |= {"synchronisations": 2, "blocked_us": 12.5}
    (found,) = judged(26824, recording).aspects[0].that(Standing.FAILS)
    assert found.where == f"{row['gpu_us']:g} µs of GPU work, {row['host_us']:g} of host work"
    assert "→ 2 synchronisations" in found.figures
    assert "→ 12.5 µs" in found.figures


def test_a_mask_that_costs_more_than_is_saved_contradicts_26824() -> None:
    recording = recorded("length_copy")
    for mask in recording["verify_masks"]:
        mask["fill_us"] = 5000.0
    answer = judged(26824, recording)
    assert counts(answer.aspects[2]) == (0, len(answer.aspects[2].observations), 0)
    assert "5,000 µs" in answer.notes[0]
    recording["verify_masks"] = []
    assert judged(26824, recording).aspects[2].verdict == "not recorded"
