"""The numbers at the top of a notebook's cells can be changed, and what follows moves with them."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from notebooks.execute import FOLDER
from tests.devices import IN_INTERPRETER


def run_changed(name: str, changes: dict[str, str], until: str = "") -> dict[str, Any]:
    """The names of a script after it ran, up to some words, with lines exchanged, each of which it has once."""
    program = (FOLDER / name).read_text(encoding="utf-8")
    assert until in program
    for line, other in changes.items():
        assert program.count(f"\n{line}") == 1, line
        program = program.replace(f"\n{line}", f"\n{other}")
    names: dict[str, Any] = {"__name__": "notebook"}
    here = Path.cwd()
    try:
        os.chdir(FOLDER)  # where Jupyter runs them
        exec(program.partition(until)[0] if until else program, names)
    finally:
        os.chdir(here)
    return names


@pytest.mark.parametrize("num_draft_tokens", [1, 6])
def test_another_number_of_draft_tokens_is_read(num_draft_tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_changed("1_forward_modes.py", {"NUM_DRAFT_TOKENS = 4 ": f"NUM_DRAFT_TOKENS = {num_draft_tokens} "})
    right, wrong = capsys.readouterr().out.partition("with d forgotten")[::2]
    assert right.count(": right") == 2 * num_draft_tokens
    assert "WRONG" not in right
    assert wrong.count(": WRONG") == 4 * num_draft_tokens  # as many again with d added twice
    assert [each.kernel_len for each in names["reads"]] == [14, 7]


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


@IN_INTERPRETER
def test_other_batches_fill_a_graphs_buffers(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {
        "WIDTH = 4": "WIDTH = 2",
        "CAPTURED = (2, 4)": "CAPTURED = (1, 3)",
        "FIRST, SECOND, THIRD = (56, 23, 70, 37), (12, 30, 20), (18,)": "FIRST, SECOND, THIRD = (30, 12, 44), (20, 5), (9,)",
        'MODE = "draft_extend_v2"': 'MODE = "target_verify"',
        "REQUESTS, DRAFT_TOKENS = 64, 8": "REQUESTS, DRAFT_TOKENS = 3, 5",
    }
    run_changed("5_draft_extend_graph.py", changes)
    said = capsys.readouterr().out
    assert "selected rows: 2, the same bits" in said
    assert "pages that hold NaN now: [0]" in said
    assert "second replay: live 31, padding 9, stale_read 5, stale 2, preset 9" in said
    assert "selected row           3 rows; after the next replay logits overwritten, hidden states kept" in said
    assert "all rows         15 rows" in said


@pytest.mark.parametrize("num_draft_tokens", [2, 7])
def test_another_draft_is_planned_beside(num_draft_tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {
        "D = 4 ": f"D = {num_draft_tokens} ",
        'DRAFTS, PLANNED_BY, DRAFT_US = "chains", "fused", 100.0': 'DRAFTS, PLANNED_BY, DRAFT_US = "trees", "fused", 400.0',
        "WINDOW_US = (0.0, 140.0)": "WINDOW_US = None",
        "DRAFT_TOKENS = 16 ": "DRAFT_TOKENS = 64 ",
    }
    names = run_changed("6_plan_stream.py", changes)
    said = capsys.readouterr().out
    assert "ChainVerify: keeps its word" in said
    assert "PlansTheTree: CAUGHT, the draft reaches mask" in said
    assert [cause for cause, tensors in names["changed"].items() if tensors["mask"]] == ["the draft's tree"]
    assert len(names["wanted"]) == num_draft_tokens
    assert "launches of a graph" in said


def test_another_geometry_turns_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {
        'GEOMETRY = "llama-3.1-8b"': 'GEOMETRY = "gpt-oss-120b"',
        "REQUESTS, KV_LEN = 64, 4096": "REQUESTS, KV_LEN = 3, 600",
        "KV_DTYPE = torch.bfloat16": "KV_DTYPE = torch.float8_e4m3fn",
        'SCENARIO = "decode/llama-3.1-8b/trace64"': 'SCENARIO = "target_verify/qwen3-32b/3q4s600"',
    }
    ceilings = run_changed("8_rooflines.py", changes)["CEILINGS"]

    def is_matrix_bound(q_len: int) -> bool:
        """Of one request: 64 query heads, 8 of keys and values, all of 64; a byte for a key's number, two for a row's."""
        seen = sum(range(600 - q_len + 1, 601))
        num_bytes = 2 * 600 * 8 * 64 + 2 * q_len * 64 * 64 * 2
        return 4 * 64 * 64 * seen / ceilings.matrix_rate_tflops / 1e3 > num_bytes / ceilings.bandwidth_gbps

    turn = next(q_len for q_len in range(1, 600) if is_matrix_bound(q_len))
    said = capsys.readouterr().out
    assert f"gpt-oss-120b, 3 x 600 keys: the matrix units are the limit from {turn} query tokens per request" in said
    assert "3 requests of 600 to 600 keys" in said


def test_a_shorter_split_is_wrong_for_more_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "engine", sys)  # so that the notebook's module does not stay
    names = run_changed("9_recorded_calls.py", {"LAST_KEY = 128": "LAST_KEY = 80"})
    assert names["comparison"].wrong.nonzero().tolist() == [[row, head] for row in (0, 1, 3) for head in (4, 5, 6, 7)]
    assert "in 3 of 3 results where a request has 6 pages or more." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mutant", "shown"),
    [("table_not_populated", "verify_rows_at_last_position"), ("finite_sentinel", "finite_sentinel")],
)
def test_another_mutant_is_judged(mutant: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {'MUTANT = "verify_rows_at_last_position"': f'MUTANT = "{mutant}"'}
    names = run_changed("7_judging.py", changes, until="# A second one reads V's last page")
    said = capsys.readouterr().out.partition(f"{mutant}: ")[2].rpartition("found by")[2]
    assert said.count(": wrong\n") == min(len(names["record"]["kills"]), names["MOST_SHOWN"])
    assert ": right" not in said.replace("without the defect: right", "")
    assert names["shown"] == shown
