"""The numbers at the top of a notebook's cells can be changed, and what follows moves with them."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from notebooks.execute import FOLDER


def run_changed(name: str, changes: dict[str, str]) -> dict[str, Any]:
    """The names of a script after it ran with lines exchanged, each of which it has once."""
    program = (FOLDER / name).read_text(encoding="utf-8")
    for line, other in changes.items():
        assert program.count(f"\n{line}") == 1, line
        program = program.replace(f"\n{line}", f"\n{other}")
    names: dict[str, Any] = {"__name__": "notebook"}
    here = Path.cwd()
    try:
        os.chdir(FOLDER)  # where Jupyter runs them
        exec(program, names)
    finally:
        os.chdir(here)
    return names


def test_another_draft_is_drawn_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"PREFIX_LENS = (9, 6)": "PREFIX_LENS = (3, 8, 1)", "NUM_STEPS = 3": "NUM_STEPS = 2"}
    run_changed("2_draft_steps.py", changes)
    said = capsys.readouterr().out
    assert "list 1: kv_indptr [0, 5, 15, 18], 18 slots" in said
    assert "list 2" not in said
    assert "lists spoilt: steps whose output changed: none" in said
    assert "page table spoilt: [0]" in said
    assert "requests of 81,920 tokens, 2 steps" in said


@pytest.mark.parametrize(
    ("host_us", "num_layers", "with_us", "without_us"),
    [(650, 1, 753, 650), (650, 32, 3933, 3283), (0, 32, 3283, 3283)],
    ids=["the host is slower", "the GPU is slower", "no host work"],
)
def test_the_bubble_moves_with_host_and_layers(
    host_us: int, num_layers: int, with_us: int, without_us: int, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"HOST_WORK_US = 650": f"HOST_WORK_US = {host_us}", "NUM_LAYERS = 32": f"NUM_LAYERS = {num_layers}"}
    run_changed("3_length_copy.py", changes)
    said = capsys.readouterr().out
    assert f"with the copy     a step takes {with_us:,} µs" in said
    assert f"without the copy  a step takes {without_us:,} µs" in said


def test_another_loop_and_mask_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {
        "GPU_US, HOST_US = 500, 0": "GPU_US, HOST_US = 2000, 200",
        "MAX_BATCH_SIZE, D, MAX_CONTEXT_LEN = 256, 4, 131072": "MAX_BATCH_SIZE, D, MAX_CONTEXT_LEN = 128, 8, 4096",
        "BATCH_SIZE, LENGTH = 64, 8192": "BATCH_SIZE, LENGTH = 2, 100",
    }
    run_changed("3_length_copy.py", changes)
    said = capsys.readouterr().out
    for num_bytes in (8 * 200 + 2 * 64, 128 * 8 * (4096 + 8), 128 * 64):
        assert said.count(f" {num_bytes:,} ") == 1
        assert said.count(f" {num_bytes:,}\n") == 1


def test_another_batch_is_judged_at_another_point(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {
        'BATCH = "2q4s18"': 'BATCH = "3q2s30"',
        "REQUESTS, KEYS, Q_LEN = 16, 4096, 4": "REQUESTS, KEYS, Q_LEN = 1, 1024, 32",
    }
    run_changed("4_draft_extend_kernels.py", changes)
    said = capsys.readouterr().out
    assert "cum_seq_lens_q     [0, 2, 4, 6]" in said
    assert "decode  right" in said
    assert "context right" in said
    assert "floor 0.7 µs (matrix)" in said
