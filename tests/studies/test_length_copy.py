"""The loop on a CPU, its command line, and on a GPU what the study is about."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from studies import length_copy, loops
from studies.length_copy import CopyLoopSettings, DecodeLoop, StepEnd, measure_ends, measure_masks
from studies.step_profile import STEP_NAME, exported_trace, read_profile, summary
from tests.commands.command import run
from tests.studies.conftest import Command
from tests.studies.simulated import only_run
from tests.studies.test_step_profile import facts_of, running_ahead, with_copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_us": 0}, "gpu_us=0 must be at least 1"),
        ({"host_us": -1}, "host_us=-1 must be at least 0"),
        ({"steps": 2}, "steps=2 must be at least 3"),
        ({"warm_up_steps": 0}, "warm_up_steps=0 must be at least 1"),
    ],
)
def test_a_loop_that_cannot_be_measured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CopyLoopSettings(**{"gpu_us": 1, "host_us": 1} | changes)


def cpu_loop(settings: CopyLoopSettings, forward: Any = lambda: None) -> DecodeLoop:
    return DecodeLoop(settings, forward, torch.device("cpu"))


@pytest.mark.parametrize("variant", list(StepEnd))
def test_every_step_is_marked_and_only_one_variant_reads_the_lengths(
    variant: StepEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CopyLoopSettings(gpu_us=1, host_us=0, batch_size=3, seq_len=30, warm_up_steps=2, steps=4)
    forwards: list[int] = []
    loop = cpu_loop(settings, lambda: forwards.append(1))
    read, read_lengths = loop.mirror.read, []
    monkeypatch.setattr(loop.mirror, "read", lambda seq_lens: read_lengths.append(read(seq_lens)[0]))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loop.run(variant)
    names = [each["name"] for each in exported_trace(recorded)["traceEvents"]]
    assert [name for name in names if STEP_NAME.fullmatch(name)] == [f"step {i}" for i in range(6)]
    assert len(forwards) == 6
    grown = [[30 + (number + 1) * accepted for accepted in loop.accepted.tolist()] for number in range(6)]
    assert read_lengths == (grown if variant is StepEnd.WITH_COPY else [])


def test_the_scheduler_takes_its_time_on_the_host() -> None:
    loop = cpu_loop(CopyLoopSettings(gpu_us=1, host_us=3000, batch_size=1, seq_len=8))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loop.run(StepEnd.WITHOUT_COPY)
    durations_us = [each["dur"] for each in exported_trace(recorded)["traceEvents"] if each["name"] == "schedule"]
    assert len(durations_us) == loop.settings.steps_per_run
    assert min(durations_us) >= 3000


def test_both_ends_are_run_in_turns_and_make_a_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = CopyLoopSettings(gpu_us=50, host_us=0, batch_size=2, seq_len=8, warm_up_steps=1, steps=4, repeats=2)
    ran: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(length_copy, "MatrixProducts", lambda gpu_us, device: SimpleNamespace(graph=graph, products=3))
    monkeypatch.setattr(length_copy, "DecodeLoop", lambda settings, forward, device: cpu_loop(settings, forward))
    graph = SimpleNamespace(replay=lambda: ran.append("forward"))
    monkeypatch.setattr(loops, "unprofiled_us", lambda run: only_run(ran, run))
    monkeypatch.setattr(loops, "profiled", lambda run: (run(), read_profile({"traceEvents": running_ahead()}))[1])
    rows = measure_ends(settings)
    assert [row["arm"] for row in rows] == [end.value for end in StepEnd]
    assert ran.count("forward") == 2 * (1 + 2 * settings.repeats) * settings.steps_per_run
    for row in rows:
        assert row["unprofiled_step_us"] == [180.0] * 2
        assert [[each["step"] for each in run] for run in row["runs"]] == [[1, 2, 3, 4]] * 2
        assert (row["medians"]["step_us"], row["matrix_products"], row["steps"]) == (50, 3, 4)
        assert [name for _, name, _, _ in row["timeline"] if STEP_NAME.fullmatch(name)] == [
            "step 2",
            "step 3",
            "step 4",
        ]


def recorded_variant(settings: CopyLoopSettings, variant: StepEnd) -> dict[str, Any]:
    """What `measure_ends` returns, of a trace made by hand."""
    facts = facts_of(with_copy() if variant is StepEnd.WITH_COPY else running_ahead())
    return {
        "arm": variant.value,
        "gpu_us": settings.gpu_us,
        "host_us": settings.host_us,
        "medians": summary(facts),
        "unprofiled_step_us": [1234.5],
    }


def test_the_command_line_measures_all_pairs_writes_json_and_prints_a_table(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        length_copy, "measure_ends", lambda settings: [recorded_variant(settings, variant) for variant in StepEnd]
    )
    masks = [{"form": "full", "mask_bytes": 134221824, "fill_us": 33.5}]
    monkeypatch.setattr(length_copy, "measure_masks", lambda device: masks)
    done = command("length-copy --gpu-us 500,2000 --host-us 0,200")
    recorded = done.recorded
    assert done.status == 0
    assert recorded["environment"] == {"gpu": "simulated"}
    assert recorded["verify_masks"] == masks
    pairs = [(row["gpu_us"], row["host_us"], row["arm"]) for row in recorded["arms"]]
    assert pairs == list(itertools.product((500, 2000), (0, 200), ("with the copy", "without the copy")))
    for words in ("with the copy", "62.0", "65.4", "1,234.5", "134,221,824", "33.50"):  # 85 of 130 µs are 65.4 %
        assert words in done.printed


def test_a_wrong_command_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("experiments length-copy --steps 1") == 2
    assert "steps=1 must be at least 3" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_copy_costs_a_synchronisation_and_nothing_else_does() -> None:
    with_it, without_it = measure_ends(
        CopyLoopSettings(gpu_us=1000, host_us=100, batch_size=8, seq_len=256, steps=6, repeats=1)
    )
    assert all(row["synchronisations"] >= 1 and row["blocked_us"] > 0 for row in with_it["runs"][0])
    assert all(row["synchronisations"] == 0 and row["blocked_us"] == 0 for row in without_it["runs"][0])
    assert with_it["medians"]["gap_us"] >= 100  # the scheduler's time at least
    assert without_it["medians"]["step_us"] < with_it["medians"]["step_us"]
    for variant in (with_it, without_it):
        assert len([name for _, name, _, _ in variant["timeline"] if STEP_NAME.fullmatch(name)]) == 3


@pytest.mark.gpu
def test_the_full_mask_takes_longer_to_fill() -> None:
    full, qlen_only = measure_masks(torch.device("cuda"))
    assert (full["mask_bytes"], qlen_only["mask_bytes"]) == (134_221_824, 4_096)
    assert full["fill_us"] > 3 * qlen_only["fill_us"]
