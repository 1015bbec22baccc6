"""What the studies of loops share: refused settings, variants that run in turns with a row each, a command of all pairs."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from studies import length_copy, loops, plan_stream
from studies.length_copy import CopyLoopSettings, DecodeLoop, StepEnd, measure_ends
from studies.plan_stream import PlanLoopSettings, SpeculativeLoop, measure_plannings
from studies.step_profile import STEP_NAME, read_profile
from tests.studies.conftest import Command
from tests.studies.recorded import recorded
from tests.studies.simulated import only_run, quick_host_time
from tests.studies.test_plan_stream import profiled
from tests.studies.test_step_profile import running_ahead

CPU = torch.device("cpu")


COPIES_OF = partial(CopyLoopSettings, gpu_us=1, host_us=1)
PLANS_OF = partial(PlanLoopSettings, draft_us=1, verify_us=1)


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (COPIES_OF, {"gpu_us": 0}, "gpu_us=0 must be at least 1"),
        (COPIES_OF, {"host_us": -1}, "host_us=-1 must be at least 0"),
        (COPIES_OF, {"steps": 2}, "steps=2 must be at least 3"),
        (COPIES_OF, {"warm_up_steps": 0}, "warm_up_steps=0 must be at least 1"),
        (PLANS_OF, {"draft_us": 0}, "draft_us=0 must be at least 1"),
        (PLANS_OF, {"repeats": 0}, "repeats=0 must be at least 1"),
        (PLANS_OF, {"max_context_len": 4159}, "must hold the 4160 tokens of the last step"),
    ],
)
def test_a_loop_that_cannot_be_measured_is_refused(settings: Any, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What runs: "stand-in" for a replay of a stand-in for a model, and the variant of each run, which takes 900 µs."""
    found: list[Any] = []
    graph = SimpleNamespace(replay=lambda: found.append("stand-in"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for module in (length_copy, plan_stream):
        monkeypatch.setattr(module, "MatrixProducts", lambda gpu_us, device: SimpleNamespace(graph=graph, products=3))
    monkeypatch.setattr(length_copy, "DecodeLoop", lambda settings, forward, device: DecodeLoop(settings, forward, CPU))
    monkeypatch.setattr(
        plan_stream,
        "SpeculativeLoop",
        lambda settings, draft, verify, device: SpeculativeLoop(settings, draft, verify, CPU),
    )
    monkeypatch.setattr(plan_stream, "host_time", quick_host_time)
    monkeypatch.setattr(loops, "unprofiled_us", lambda run: only_run(found, lambda: (run(), *run.args)[1]))
    return found


def hold_turns(ran: list[Any], variants: Sequence[Any], *, shuffled: bool) -> None:
    """Hold each of two rounds to have run every variant once."""
    order = [each for each in ran if each != "stand-in"]
    rounds = order[: len(variants)], order[len(variants) :]
    assert all(len(each) == len(variants) and {*each} == {*variants} for each in rounds)
    assert (rounds[0] != rounds[1]) is shuffled


def test_both_ends_are_run_in_turns_and_make_a_row_each(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = CopyLoopSettings(gpu_us=50, host_us=0, batch_size=2, seq_len=8, warm_up_steps=1, steps=4, repeats=2)
    monkeypatch.setattr(loops, "profiled", lambda run: (run(), read_profile({"traceEvents": running_ahead()}))[1])
    rows = measure_ends(settings)
    assert [row["arm"] for row in rows] == [end.value for end in StepEnd]
    assert ran.count("stand-in") == 2 * (1 + 2 * settings.repeats) * settings.steps_per_run
    hold_turns(ran, list(StepEnd), shuffled=False)
    for row in rows:
        assert row["unprofiled_step_us"] == [180.0] * 2
        assert [[each["step"] for each in run] for run in row["runs"]] == [[1, 2, 3, 4]] * 2
        assert (row["medians"]["step_us"], row["matrix_products"], row["steps"]) == (50, 3, 4)
        steps = [name for _, name, _, _ in row["timeline"] if STEP_NAME.fullmatch(name)]
        assert steps == ["step 2", "step 3", "step 4"]


def test_every_planning_is_checked_run_in_turns_and_makes_a_row(
    ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"batch_size": 3, "seq_len": 30, "page_size": 16, "max_context_len": 256, "warm_up_steps": 1, "steps": 2}
    monkeypatch.setattr(loops, "profiled", lambda run: (run(), profiled())[1])
    rows = measure_plannings(PlanLoopSettings(draft_us=1, verify_us=1, repeats=2, **sizes))  # type: ignore[arg-type]
    # The drafts of 3 iterations in two checks, both stand-ins in two runs with and two without a profile, once for the host.
    assert ran.count("stand-in") == len(plan_stream.VARIANTS) * (2 * 3 + 4 * 3 * 2 + 2)
    hold_turns(ran, plan_stream.VARIANTS, shuffled=True)
    assert [(row["drafts"], row["builder"], row["start"]) for row in rows] == WORDS
    for row in rows:
        assert (row["draft_us"], row["draft_matrix_products"], row["max_context_len"]) == (1, 3, 256)
        assert row["unprofiled_iteration_us"] == [300.0] * 2
        assert row["medians"]["iteration_us"] == 1000
        assert len(row["runs"]) == len(row["host_samples_us"]) == 2
        assert row["timeline"]


WORDS = [(each.drafts.value, each.builder.value, each.start.value) for each in plan_stream.VARIANTS]


COPIES, PLANNINGS = recorded("length_copy"), recorded("plan_stream")
MASK, FIX_UP = COPIES["verify_masks"][0], PLANNINGS["fix_ups"][0]


def of_loop(rows: Sequence[dict[str, Any]], settings: Any) -> list[dict[str, Any]]:
    """Recorded rows, as if of a loop with these settings."""
    return [row | asdict(settings) for row in rows]


@pytest.mark.parametrize(
    ("line", "keys", "expected", "alone"),
    [
        (
            "length-copy --gpu-us 500,2000 --host-us 0,200",
            ("gpu_us", "host_us", "arm"),
            itertools.product((500, 2000), (0, 200), ("with the copy", "without the copy")),
            {"verify_masks": [MASK]},
        ),
        (
            "plan-stream --draft-us 100,400 --verify-us 900",
            ("draft_us", "verify_us", "drafts", "builder", "start"),
            ((draft_us, 900, *words) for draft_us in (100, 400) for words in WORDS),
            {"fix_ups": [FIX_UP | dict(zip(FIX_UP, point, strict=False)) for point in plan_stream.FIX_UP_POINTS]},
        ),
    ],
    ids=["length-copy", "plan-stream"],
)
def test_a_command_measures_all_pairs_writes_json_and_prints_tables(
    line: str,
    keys: Sequence[str],
    expected: Iterable[Any],
    alone: dict[str, Any],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(length_copy, "measure_ends", partial(of_loop, COPIES["arms"][:2]))
    monkeypatch.setattr(length_copy, "measure_masks", lambda device: [MASK])
    monkeypatch.setattr(plan_stream, "measure_plannings", partial(of_loop, PLANNINGS["arms"][: len(WORDS)]))
    monkeypatch.setattr(plan_stream, "measure_fix_up", lambda *point: FIX_UP | dict(zip(FIX_UP, point, strict=False)))
    done = command(line)
    assert (done.status, done.recorded["environment"]) == (0, {"gpu": "simulated"})
    assert [tuple(row[key] for key in keys) for row in done.recorded["arms"]] == list(expected)
    assert done.recorded | alone == done.recorded
    shown = [f"{value:,.1f}" for row in done.recorded["arms"] for value in row["medians"].values() if value > 1]
    assert sum(text in done.printed for text in shown) > 0.6 * len(shown)
