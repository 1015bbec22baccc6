"""SageAttention's scales: the ragged reference against a loop over heads, rows and keys that takes each scale by its rule."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.calls import RaggedContextCall
from lab.checks.explain.call_features import CallLog, features_of_call
from lab.names import AttentionCall
from lab.recorded import own_form
from lab.recorded.call import RecordedCall, RecordingError, recorded_fault
from lab.recorded.shrink import shrunk
from lab.references import assert_close_to_reference, trtllm_ragged_attention_deepseek
from lab.references.assertion import truth_of_problem
from tests.cases import Arguments, ragged_arguments, ragged_batch

E4M3 = torch.float8_e4m3fn
PADDING = 3  # rows and tokens after the last request


def arguments(dtype: torch.dtype, q_block: int, k_block: int, flat: bool = False, **changes: Any) -> Arguments:
    """Three requests of 5, 1 and 18 rows over 18, 7 and 33 keys, 4/2 heads of 6 and 5 elements. Scales of no block are NaN."""
    numbers = torch.Generator().manual_seed(7)
    given = ragged_arguments(ragged_batch([5, 1, 18], [18, 7, 33], heads=(4, 2), dims=(6, 5)))
    num_rows, num_tokens = 24 + PADDING, 58 + PADDING

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (torch.rand(shape, generator=numbers) * 14 - 7).to(dtype)

    def scales(heads: int, total: int, block: int, lens: tuple[int, ...]) -> torch.Tensor:
        found = torch.full((heads, math.ceil(total / block) + 2), math.nan)
        for request, length in enumerate(lens):
            first = sum(lens[:request]) // block + request
            blocks = math.ceil(length / block)
            found[:, first : first + blocks] = torch.rand(heads, blocks, generator=numbers) + 0.05
        return found.flatten() if flat else found

    scaled = {
        "query": drawn(num_rows, 4, 6),
        "key": drawn(num_tokens, 2, 6),
        "value": drawn(num_tokens, 2, 5, dtype=E4M3),
        "sage_attn_sfs": (
            scales(4, num_rows, q_block, (5, 1, 18)),
            scales(2, num_tokens, k_block, (18, 7, 33)),
            None,
            torch.rand(10 if flat else (2, 5), generator=numbers) + 0.05,
        ),
        "num_elts_per_sage_attn_blk": (q_block, k_block, 0, 1),
        "bmm1_scale": 0.3,
        "bmm2_scale": 0.9,
        "out": torch.full((num_rows, 4, 5), math.nan, dtype=torch.float64),
    }
    return given | scaled | changes


def by_loop(given: Arguments) -> torch.Tensor:
    q_block, k_block, _, _ = given["num_elts_per_sage_attn_blk"]
    q_scales, k_scales, _, v_scales = (None if each is None else each.double() for each in given["sage_attn_sfs"])
    q_scales, k_scales, v_scales = q_scales.view(4, -1), k_scales.view(2, -1), v_scales.view(2, 5)
    out = torch.zeros(24, 4, 5, dtype=torch.float64)
    for request, (q_first, q_len, k_first, kv_len) in enumerate(((0, 5, 0, 18), (5, 1, 18, 7), (6, 18, 25, 33))):
        for head in range(4):
            kv_head = head // 2
            for row in range(q_len):
                query = given["query"][q_first + row, head].double()
                query = query * q_scales[head, q_first // q_block + request + row // q_block]
                weights = []
                for key in range(kv_len - q_len + row + 1 if given["is_causal"] else kv_len):
                    scale = k_scales[kv_head, k_first // k_block + request + key // k_block]
                    logit = 0.3 * (query * given["key"][k_first + key, kv_head].double() * scale).sum()
                    weights.append(logit.exp())
                seen = given["value"][k_first : k_first + len(weights), kv_head].double() * v_scales[kv_head]
                weighed = torch.stack(weights).unsqueeze(1) * seen
                out[q_first + row, head] = 0.9 * weighed.sum(dim=0) / torch.stack(weights).sum()
    return out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("q_block", "k_block", "flat"), [(1, 16, False), (4, 4, True), (16, 1, False)])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_each_row_and_key_has_the_scale_of_its_block(
    dtype: torch.dtype, q_block: int, k_block: int, is_causal: bool, flat: bool
) -> None:
    given = arguments(dtype, q_block, k_block, flat, is_causal=is_causal)
    out, lse = trtllm_ragged_attention_deepseek(**given)
    torch.testing.assert_close(out[:24], by_loop(given), rtol=1e-12, atol=1e-12)
    assert not out[24:].any()
    assert lse.isfinite()[:24].all()


def test_the_assertion_takes_a_rounded_result_and_refuses_one_of_another_scale() -> None:
    given = arguments(torch.int8, 1, 16) | {"out": None}
    right = by_loop(given).bfloat16()
    whole = torch.cat((right, right[:PADDING]))
    assert_close_to_reference(whole, **given)
    assert truth_of_problem(RaggedContextCall(**given).problem()).arithmetic == E4M3
    with pytest.raises(AssertionError, match="vectors are wrong"):
        assert_close_to_reference(1.4 * whole, **given)


def test_a_recorded_call_is_judged_by_its_scales_and_not_shrunk(tmp_path: Path) -> None:
    given = arguments(torch.int8, 4, 16) | {"out": None}
    del given["workspace_buffer"]
    call = RecordedCall(
        AttentionCall.RAGGED_CONTEXT, given, *trtllm_ragged_attention_deepseek(**given, workspace_buffer=None)
    )
    read = own_form.read(own_form.write(tmp_path, call))
    assert recorded_fault(read) is None
    assert recorded_fault(replace(read, out=-call.out)) is not None
    with pytest.raises(RecordingError, match=r"sage_attn_sfs\) cannot be shrunk yet"):
        shrunk(read, recorded_fault)


def test_the_default_output_is_bf16_and_a_call_with_scales_has_the_feature() -> None:
    given = arguments(torch.int8, 1, 16) | {"out": None}
    assert trtllm_ragged_attention_deepseek(**given)[0].dtype == torch.bfloat16
    found = features_of_call(AttentionCall.RAGGED_CONTEXT, given, CallLog()).features
    assert (found["block_scales"], found["sage_rows"], found["sage_keys"]) == (True, 1, 16)
