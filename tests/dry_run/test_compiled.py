"""What nvcc's front end says of XQA, XQA MLA and fmha_v2: the recording, and a few shapes compiled here."""

import json
from pathlib import Path

import pytest
import torch

from lab.calls.problem import E4M3
from lab.dry_run import build, compiled_table
from lab.dry_run.compiled import Shape, compiled
from lab.kernels.support.trtllm import FMHA_V2
from lab.kernels.support.xqa import XQA, XQA_MLA

RECORDED = Path(__file__).parents[2] / "results" / "blackwell-dry-run"
ROWS = compiled_table.read(RECORDED / "compiled.json")
BF16, NVFP4 = torch.bfloat16, torch.uint8
SM90, SM120 = (9, 0), (12, 0)


def test_a_row_is_written_as_it_was_read() -> None:
    recorded = json.loads((RECORDED / "compiled.json").read_text())["rows"]
    assert json.loads(json.dumps([compiled_table.written(row) for row in ROWS])) == recorded


@pytest.mark.parametrize("kernel", [XQA, XQA_MLA], ids=str)
def test_why_not_refuses_what_does_not_compile_and_nothing_else(kernel: object) -> None:
    rows = [row for row in ROWS if row.shape.kernel is kernel]
    assert {row.refusal is None for row in rows} == {True, False}
    assert [row for row in rows if (compiled_table.judged(row.shape) is None) != (row.refusal is None)] == []


def test_fmha_v2_is_taken_for_head_dims_that_are_generated_and_fit() -> None:
    taken = [row for row in ROWS if row.shape.kernel is FMHA_V2 and compiled_table.judged(row.shape) is None]
    assert {row.shape.head_dim for row in taken} == {64, 128, 256}
    assert [row for row in taken if row.refusal is not None] == []


def test_the_page_is_made_of_the_recording() -> None:
    facts = json.loads((RECORDED / "compiled.json").read_text())["environment"]
    assert (RECORDED / "compiled.md").read_text() == compiled_table.markdown(ROWS, facts)


# Three of the recorded shapes, so that a newer FlashInfer's difference is seen: about eight seconds of one core.
@pytest.mark.skipif(build.why_not_built() is not None, reason=str(build.why_not_built()))
def test_a_few_shapes_compile_here_as_recorded() -> None:
    sm90 = compiled(Shape(XQA, SM90, (BF16, BF16, BF16), head_dim=128, group=20))
    assert [each.source for each in sm90] == ["mha.cu", "mha_sm90.cu"]
    assert sm90[0].refusal is None
    assert str(sm90[1].refusal).endswith("static_assert(Gemm0Acc::size == 1 || Gemm0Acc::size % 2 == 0)")
    (sm120,) = compiled(Shape(XQA, SM120, (BF16, E4M3, BF16), head_dim=64, group=64))
    assert (sm120.refusal, sm120.shared_memory_bytes) == (None, 93_440)
    (unscaled,) = compiled(Shape(XQA, SM120, (BF16, NVFP4, BF16), head_dim=80))
    assert "not exact: constexpr uint32_t nbValidGrains" in str(unscaled.refusal)
