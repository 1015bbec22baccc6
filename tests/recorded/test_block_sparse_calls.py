"""Recorded calls whose K/V heads select pages of their own: what is kept, what is judged, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import references
from lab.calls import AttentionCall
from lab.checks import Outcome
from lab.checks.run.judge import judge_calls
from lab.checks.run.verdicts import CaseVerdict
from lab.metadata.mha.block_sparse import NUM_PAGES, PAGE_SIZE, as_pages
from lab.recorded import own_form
from lab.recorded.call import RecordedCall, RecordingError, recorded_fault
from lab.recorded.case import RecordedCase, recorded_cases, traced_requests
from lab.recorded.shrink import shrunk
from lab.recorded.timed import RecordedPass
from tests.cases import block_sparse_arguments, random_batch

PAGES = [[[0, 3], [0], [1]], [[1, 2], [], [0, 1, 2]]]
CPU = torch.device("cpu")


def arguments() -> dict[str, Any]:
    batch = random_batch([1] * 3, [50, 16, 37], head_dim=64)
    return block_sparse_arguments(batch, PAGES, out_dtype=None, return_lse=False, bmm1_scale=0.125)


def written(folder: Path, given: dict[str, Any], out: torch.Tensor | None = None) -> RecordedCase:
    out = references.trtllm_batch_decode_with_kv_cache(**given) if out is None else out
    versions = {"flashinfer": "0.7.2"}
    call = RecordedCall(AttentionCall.DECODE, given, out, versions=versions, time="20261126_101112_131415", number=7)
    own_form.write(folder, call)
    (case,) = recorded_cases(folder)
    return case


def judged(folder: Path, **settings: Any) -> CaseVerdict:
    (verdict,) = judge_calls(folder, device="cpu", isolated=False, **settings).verdicts
    return verdict


def test_a_right_call_is_right_and_keeps_the_pages_that_some_head_selects(tmp_path: Path) -> None:
    given = arguments()
    call = written(tmp_path, given).read()
    live = {given["block_tables"][0, 0, 0], given["block_tables"][0, 0, 1], given["block_tables"][1, 2, 2]}
    assert {int(page) for page in live} <= {*(call.pages or ())}
    assert len(call.pages or ()) == 8  # of 4, 1 and 3 pages
    assert torch.equal(call.given["seq_lens"], given["seq_lens"])
    assert judged(tmp_path).outcome is Outcome.RIGHT
    assert judged(tmp_path, implementation=references).outcome is Outcome.RIGHT


@pytest.mark.parametrize("rows", [1, 2])
def test_pages_that_share_memory_are_kept_apart(tmp_path: Path, rows: int) -> None:
    """SGLang's compact cache is the pages of each head one after another. Those of one row do not overlap."""
    heads, draw = 2, torch.Generator().manual_seed(0)
    compact = torch.randn(2, rows, heads, NUM_PAGES, PAGE_SIZE, 16, generator=draw)
    first = torch.arange(rows, dtype=torch.int32)[:, None] * heads * NUM_PAGES
    given = {
        "query": torch.randn(rows, heads * 2, 16, generator=draw),
        "kv_cache": as_pages(compact),
        "workspace_buffer": None,
        "block_tables": (first + torch.arange(NUM_PAGES, dtype=torch.int32)).repeat(heads, 1, 1),
        "seq_lens": torch.full((heads, rows), 2000, dtype=torch.int32),
        "max_seq_len": NUM_PAGES * PAGE_SIZE,
        "bmm1_scale": 0.25,
        "q_len_per_req": 1,
        "enable_block_sparse_attention": True,
    }
    call = written(tmp_path, given).read()
    assert torch.equal(references.trtllm_batch_decode_with_kv_cache(**call.arguments()), call.out)
    assert judged(tmp_path).outcome is Outcome.RIGHT
    for own, side in zip(call.given["kv_cache"], given["kv_cache"], strict=True):
        assert torch.equal(own, side[list(call.pages or ())])
        assert (own.stride() == side.stride()) == (rows == 1)
        assert own.is_contiguous() == (rows == 2)
    assert len(call.lost) == rows - 1
    assert all("elements of kv_cache share memory" in each for each in call.lost)


def test_the_output_of_another_heads_pages_is_wrong(tmp_path: Path) -> None:
    given = arguments()
    first = {name: given[name][:1].expand_as(given[name]).contiguous() for name in ("block_tables", "seq_lens")}
    written(tmp_path, given, references.trtllm_batch_decode_with_kv_cache(**given | first))
    found = judged(tmp_path)
    assert found.outcome is Outcome.WRONG
    assert "head 2" in found.judged.wrongs[0] or "head 3" in found.judged.wrongs[0]


def test_a_key_that_is_not_finite_is_named_with_its_head(tmp_path: Path) -> None:
    given = arguments()
    given["kv_cache"][0][int(given["block_tables"][1, 0, 0]), 1, 5] = math.nan
    out = references.trtllm_batch_decode_with_kv_cache(**given)
    written(tmp_path, given, out)
    sentences = " ".join(judged(tmp_path).judged.suspicions)
    assert "K of request 0, key 5" in sentences
    assert "K/V head 1 holds nan" in sentences
    assert "row 0 (request 0) head 2 is not finite" in sentences


def test_what_needs_a_whole_request_is_refused(tmp_path: Path) -> None:
    case = written(tmp_path, arguments())
    with pytest.raises(RecordingError, match=r"enable_block_sparse_attention.* cannot be shrunk yet"):
        shrunk(case.read(), recorded_fault)
    with pytest.raises(RecordingError, match=r"enable_block_sparse_attention.* cannot be timed yet"):
        RecordedPass.of(case, CPU)
    with pytest.raises(RecordingError, match="no recorded call has a request with a length"):
        traced_requests([case])
