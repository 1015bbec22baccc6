"""The loop on a CPU, its facts from profiles made by hand, and on a GPU what the study is about."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lab.metadata.mha.metadata import MetadataBuilder
from lab.metadata.speculation.plan_stream import PlannedVerify, PlanStart, VerifyBackend
from studies.plan_stream import (
    VARIANTS,
    Drafts,
    Phase,
    PlanLoopSettings,
    Planning,
    SpeculativeLoop,
    iteration_facts,
    measure_fix_up,
    measure_plannings,
    random_trees,
    two_lanes,
)
from studies.step_profile import STEP_NAME, IncompleteProfileError, exported_trace, medians, read_profile
from tests.studies.test_step_profile import call, entry, kernel, step

FORWARD, PLAN = (0, 7), (0, 20)


def test_random_trees_are_trees() -> None:
    parents = random_trees(50, 8, generator=torch.Generator().manual_seed(0))
    assert (parents >= -1).all()
    assert (parents < torch.arange(8)).all()
    assert len(parents[:, 7].unique()) == 8


# --- the loop ---------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "batch_size": 3,
    "seq_len": 30,
    "page_size": 16,
    "max_context_len": 256,
    "warm_up_steps": 2,
    "steps": 4,
}
SMALL = PlanLoopSettings(draft_us=1, verify_us=1, **SIZES)
ran: list[str] = []


@pytest.fixture
def loop() -> SpeculativeLoop:
    ran.clear()
    return SpeculativeLoop(SMALL, lambda: ran.append("draft"), lambda: ran.append("verify"), torch.device("cpu"))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_iteration_and_its_phases_are_marked(loop: SpeculativeLoop, variant: Planning) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loop.run(variant)
    events = sorted(
        (each for each in exported_trace(recorded)["traceEvents"] if each.get("cat") == "user_annotation"),
        key=lambda each: float(each["ts"]),
    )
    assert [each["name"] for each in events if STEP_NAME.fullmatch(each["name"])] == [f"step {i}" for i in range(6)]
    phases = ["inputs", "draft", "plan"] + ["fix-up"] * (variant.drafts is Drafts.TREES) + ["verify"]
    assert [each["name"] for each in events if not STEP_NAME.fullmatch(each["name"])][: len(phases)] == phases
    assert ran == ["draft", "verify"] * 6


def stale_lengths(backend: VerifyBackend) -> None:
    """Plans once, and then hands out what it has."""
    plan, planned = backend.plan, []

    def once(batch: Any) -> PlannedVerify:
        planned.append(plan(batch) if not planned else planned[0])
        return planned[0]

    backend.plan = once  # type: ignore[method-assign]


def stale_mask(backend: VerifyBackend) -> None:
    backend.update_verify_buffers_to_fill_after_draft = lambda planned: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("defect", "drafts", "message"),
    [
        (
            stale_lengths,
            Drafts.CHAINS,
            "chains, fused, after the inputs: in iteration 1 .* wrong cache_seqlens_int32",
        ),
        (stale_mask, Drafts.TREES, "trees, fused, after the inputs: in iteration 0 .* wrong mask"),
    ],
)
def test_the_check_notices_what_is_stale(
    loop: SpeculativeLoop, defect: Callable[[VerifyBackend], None], drafts: Drafts, message: str
) -> None:
    variant = Planning(drafts, MetadataBuilder.FUSED, PlanStart.AFTER_INPUTS)
    defect(loop.planners[variant].backend)
    with pytest.raises(RuntimeError, match=message):
        loop.check(variant)


# --- the facts --------------------------------------------------------------------------------------------------------


def iteration(number: int, fix_up: bool = True, beside: bool = True) -> list[dict[str, Any]]:
    """An iteration of 1,000 µs whose host ranges are the first 100 µs. Its GPU work, in µs from its start:

    inputs 200..205, draft 210..310 and 310..400, plan 300..320 and 350..360 beside it (or 410..430, 460..470 after it),
    fix-up 480..490 and 492..500, verify 510..900, and 905..910 for what adds the accepted tokens.
    """
    t, ids = 1000.0 * number, 100 * number
    plan_us, lane = (300, PLAN) if beside else (410, FORWARD)
    launches: list[tuple[Phase | None, float, float, float, Any]] = [
        (Phase.INPUTS, 10, 200, 5, FORWARD),
        (Phase.DRAFT, 20, 210, 100, FORWARD),
        (Phase.DRAFT, 22, 310, 90, FORWARD),
        (Phase.PLAN, 30, plan_us, 20, lane),
        (Phase.PLAN, 32, plan_us + 50, 10, lane),
        *([(Phase.FIX_UP, 40, 480, 10, FORWARD), (Phase.FIX_UP, 42, 492, 8, FORWARD)] if fix_up else []),
        (Phase.VERIFY, 50, 510, 390, FORWARD),
        (None, 60, 905, 5, FORWARD),
    ]
    entries = [step(number, t, 100)]
    for phase in dict.fromkeys(each[0] for each in launches):
        if phase is not None:
            start_us = min(each[1] for each in launches if each[0] is phase)
            entries.append(entry("user_annotation", phase.value, t + start_us - 1, 8))
    for i, (_, host_us, start_us, duration_us, on) in enumerate(launches):
        entries.append(call("cudaLaunchKernel", t + host_us, 1, ids + i + 1))
        entries.append(kernel(t + start_us, duration_us, ids + i + 1, on))
    return entries


def profiled(**options: Any) -> Any:
    return read_profile({"traceEvents": [each for number in range(4) for each in iteration(number, **options)]})


def test_the_facts_of_an_iteration() -> None:
    facts = iteration_facts(profiled(), 1)
    assert [each.step for each in facts] == [1, 2, 3]
    assert medians(facts) == {
        "draft_us": 190,
        "plan_us": 60,
        "plan_busy_us": 30,
        "plan_launches": 2,
        "hidden_us": 30,
        "fix_up_us": 20,
        "fix_up_launches": 2,
        "between_us": 110,
        "verify_us": 390,
        "iteration_us": 1000,
    }


def test_a_chain_planned_after_its_draft_hides_nothing_and_is_not_fixed_up() -> None:
    found = medians(iteration_facts(profiled(fix_up=False, beside=False), 1))
    assert (found["plan_us"], found["hidden_us"], found["between_us"]) == (60, 0, 110)
    assert (found["fix_up_us"], found["fix_up_launches"]) == (0, 0)


def test_a_plan_that_outlasts_the_draft_is_hidden_in_part() -> None:
    entries = [each for number in range(3) for each in iteration(number)]
    for each in entries:
        if each["cat"] == "kernel" and each["dur"] == 10 and (each["pid"], each["tid"]) == PLAN:
            each["ts"] += 45  # 395..405, and the draft ends at 400
    found = medians(iteration_facts(read_profile({"traceEvents": entries}), 1))
    assert found["hidden_us"] == 20 + 5


@pytest.mark.parametrize("phase", ["draft", "plan", "verify"])
def test_a_phase_that_is_missing_is_refused(phase: str) -> None:
    entries = [each for number in range(3) for each in iteration(number) if each["name"] != phase]
    with pytest.raises(IncompleteProfileError, match=f"step 1 has no {phase} on the GPU"):
        iteration_facts(read_profile({"traceEvents": entries}), 1)


def test_a_phase_that_launched_nothing_is_refused() -> None:
    entries = [each for number in range(3) for each in iteration(number)]
    kept = [each for each in entries if each["cat"] != "kernel" or each["args"]["correlation"] % 100 not in (4, 5)]
    with pytest.raises(IncompleteProfileError, match="plan of step 1 launched nothing"):
        iteration_facts(read_profile({"traceEvents": kept}), 1)


def test_the_picture_of_an_iteration_has_two_lanes() -> None:
    lanes = two_lanes(profiled().steps[2])
    assert [(each["stream"], each["phase"], each["start_us"], each["duration_us"]) for each in lanes] == [
        ("forward", "inputs", 0, 5),
        ("forward", "draft", 10, 100),
        ("plan", "plan", 100, 20),
        ("forward", "draft", 110, 90),
        ("plan", "plan", 150, 10),
        ("forward", "fix-up", 280, 10),
        ("forward", "fix-up", 292, 8),
        ("forward", "verify", 310, 390),
        ("forward", None, 705, 5),
    ]
    assert {each["name"] for each in lanes} == {"gemm"}
    assert {each["stream"] for each in two_lanes(profiled(beside=False).steps[2])} == {"forward"}


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_plan_after_the_inputs_runs_beside_the_draft_and_no_other_does() -> None:
    rows = measure_plannings(
        PlanLoopSettings(draft_us=2000, verify_us=400, batch_size=8, seq_len=256, steps=6, repeats=1)
    )
    assert len(rows) == len(VARIANTS)
    by_variant = {(row["drafts"], row["builder"], row["start"]): row for row in rows}
    for (drafts, _, start), row in by_variant.items():
        found = row["medians"]
        beside = start == PlanStart.AFTER_INPUTS.value
        assert (found["hidden_us"] > 0.5 * found["plan_busy_us"]) if beside else (found["hidden_us"] == 0)
        assert (found["fix_up_us"] > 0) == (drafts == Drafts.TREES.value)
        assert {each["stream"] for each in row["timeline"]} == (
            {"forward"} if start == PlanStart.IN_LINE.value else {"forward", "plan"}
        )


@pytest.mark.gpu
def test_a_masks_time_is_taken_and_its_launches_counted() -> None:
    row = measure_fix_up(8, 4)
    assert row["gpu_us"] > 0
    assert row["launches"] > 1
    assert row["host_us"] > 0
