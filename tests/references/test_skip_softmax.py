"""What skip-softmax allows: an error of as much of the softmax as may be left out, and none where nothing may be."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lab.references import assert_close_to_reference, trtllm_batch_decode_with_kv_cache
from lab.references.errors import Truth
from lab.references.softmax_attention import SKIP_ROUNDING, Rules
from lab.references.truth import truth_of_requests
from tests.cases import Batch, decode_arguments, random_batch

KV_LENS, HEADS, HEAD_DIM = (200, 40), 4, 32
SCALE = HEAD_DIM**-0.5


def drawn() -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(3)
    histories = [
        (torch.randn(n, 2, HEAD_DIM, generator=generator), torch.randn(n, 2, HEAD_DIM, generator=generator))
        for n in KV_LENS
    ]
    return torch.randn(3, HEADS, HEAD_DIM, generator=generator), histories


def truth(factor: float, sinks: Tensor | None = None) -> Truth:
    query, histories = drawn()
    rules = Rules(
        bmm1_scale=SCALE,
        bmm2_scale=0.5,
        sinks=sinks,
        arithmetic=torch.float32,
        out_dtype=torch.float32,
        skip_softmax=factor,
    )
    return truth_of_requests(query, histories, [2, 1], rules)


def left_out(threshold_of: float, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return output and LSE (base 2) of a kernel that leaves out keys below `threshold_of` / L."""
    query, histories = drawn()
    outs, lses = [], []
    for row, (request, position) in enumerate(((0, 198), (0, 199), (1, 39))):
        keys, values = (side[: position + 1].double().repeat_interleave(2, dim=1) for side in histories[request])
        scores = torch.einsum("hd,nhd->hn", query[row].double(), keys) * SCALE
        small = torch.exp(scores - scores.amax(dim=1, keepdim=True)) < threshold_of / KV_LENS[request]
        scores = scores.masked_fill(small, -math.inf)
        total = scores.exp().sum(dim=1) + (0 if sinks is None else sinks.double().exp())
        outs.append(torch.einsum("hn,nhd->hd", scores.exp(), values) / total.unsqueeze(1) * 0.5)
        lses.append(total.log2())
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -1.0, 3.0, 0.0])], ids=["no sinks", "sinks"])
def test_what_may_be_left_out_is_allowed_and_more_is_not(sinks: Tensor | None) -> None:
    out, lse = left_out(4.0, sinks)
    allowed = truth(4.0, sinks)
    assert allowed.compare(out).passed
    assert allowed.wrong_lse(lse) == ""
    assert allowed.compare(allowed.expected).passed  # nothing left out
    exact = truth(0.0, sinks)
    assert exact.skipped is not None
    assert not exact.skipped.any()
    assert not exact.compare(out).passed
    assert "LSEs are wrong" in exact.wrong_lse(lse)
    assert torch.equal(exact.compare(out).bound, truth(1e-30, sinks).compare(out).bound)
    more = left_out(40.0, sinks)
    assert not allowed.compare(more[0]).passed
    assert "LSEs are wrong" in allowed.wrong_lse(more[1])
    assert "LSEs are wrong" in allowed.wrong_lse(allowed.lse_log2 + 0.01)  # a larger denominator is none of a part


@pytest.mark.parametrize("sinks", [None, torch.tensor([9.0, -1.0, 3.0, 0.0])], ids=["no sinks", "sinks"])
def test_the_threshold_is_of_the_largest_weight_and_divided_by_the_keys_of_the_request(sinks: Tensor | None) -> None:
    allowed = truth(4.0, sinks)
    assert allowed.skipped is not None
    share = allowed.skipped[..., 0]
    _, lse = left_out(4.0 * SKIP_ROUNDING, sinks)
    torch.testing.assert_close(torch.log2(1 - share), lse - allowed.lse_log2, atol=1e-5, rtol=1e-5)
    assert not allowed.compare(left_out(4.0 * KV_LENS[0] / KV_LENS[1])[0]).passed


def test_all_may_be_left_out_above_a_threshold_of_1_but_nothing_infinite() -> None:
    allowed = truth(300.0)
    zeros = torch.zeros_like(allowed.expected)
    assert allowed.compare(zeros).passed
    assert not allowed.compare(zeros * math.nan).passed
    assert allowed.wrong_lse(allowed.lse_log2 - 20) == ""
    assert "LSEs are wrong" in allowed.wrong_lse(allowed.lse_log2 - math.inf)


def test_the_error_is_that_of_a_value_opposite_to_the_output() -> None:
    query, keys = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 0.0]], [[-3.0, 0.0]]])
    values = torch.tensor([[[1.0, 0.0]], [[-4.0, 0.0]]])
    rules = Rules(bmm2_scale=-0.5, arithmetic=torch.float32, out_dtype=torch.float32, skip_softmax=2 * 0.06)
    allowed = truth_of_requests(query, [(keys, values)], [1], rules)
    assert allowed.skipped is not None
    share = math.exp(-3) / (1 + math.exp(-3))
    expected = float(allowed.expected[0, 0, 0])
    assert allowed.skipped[0, 0].tolist() == pytest.approx([share, abs(-0.5 - expected) / abs(expected)])


def test_a_call_is_compared_with_what_it_may_leave_out() -> None:
    query, histories = drawn()
    batch = Batch([query[:2]], [histories[0][0]], [histories[0][1]])
    given = decode_arguments(batch, 64, bmm1_scale=SCALE, bmm2_scale=0.5, return_lse=False)
    out = left_out(4.0)[0][:2]
    assert_close_to_reference(out, **given, skip_softmax_threshold_scale_factor=4.0, check_dtype=False)
    with pytest.raises(AssertionError, match="vectors are wrong"):
        assert_close_to_reference(out, **given, check_dtype=False)


def test_rows_keep_what_they_may_leave_out() -> None:
    allowed = truth(4.0)
    chosen = torch.tensor([False, True, True])
    assert allowed.skipped is not None
    part = allowed.of_rows(chosen).skipped
    assert part is not None
    assert torch.equal(part, allowed.skipped[chosen])
    assert replace(allowed, skipped=None).of_rows(chosen).skipped is None


def test_the_reference_leaves_out_nothing() -> None:
    given = decode_arguments(random_batch([1], [30]), return_lse=False)
    skipped = trtllm_batch_decode_with_kv_cache(**given, skip_softmax_threshold_scale_factor=100.0)
    assert torch.equal(skipped, trtllm_batch_decode_with_kv_cache(**given))
