"""The loop on a CPU, and on a GPU what the study is about."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from studies.length_copy import CopyLoopSettings, DecodeLoop, StepEnd, measure_ends, measure_masks
from studies.step_profile import STEP_NAME, exported_trace


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
