"""Softmax attention in float64 over contiguous K/V: `lab.references.attention` for one request at a time."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from lab.calls import takes
from lab.calls.ragged_context import RaggedAttention, RaggedContextCall
from lab.references.quantization import rounded
from lab.references.softmax_attention import piece_elements, unchecked_attention, visible_keys


@takes(RaggedContextCall)
def trtllm_ragged_attention_deepseek(call: RaggedContextCall) -> Any:
    """Compute attention of each request's rows over contiguous K/V: MLA's prefill before absorption.

    The keys are the new tokens, or a chunk of the prefix.

    `lab.calls.RaggedContextCall` documents parameters, shapes and dtypes, which are FlashInfer 0.7.2's. In addition, `out` may
    be float64, so that the result is not rounded, and head_dims may have any size. The host reads lengths.

    Returns:
        out [num_rows, num_qo_heads, v_head_dim]; with `return_lse`, (out, lse), lse in base 2.

    Raises:
        TypeError, ValueError, NotImplementedError: `RaggedContextCall.problem` or `RaggedAttention.check_values` refuses the
            call, before any arithmetic.
    """
    problem = call.problem()
    return problem.returned(*ragged_attention(problem))


def ragged_attention(problem: RaggedAttention) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the attention of a checked problem in float64, and round the result once to `problem.out_dtype`.

    Rows after the last request's rows are padding. Their output is zero and their LSE is -inf, even if there are sinks.

    Returns:
        out [num_rows, num_qo_heads, v_head_dim] and lse_log2 float32 [num_rows, num_qo_heads], or None.

    Raises:
        ValueError: `RaggedAttention.check_values` refuses a length or an offset.
    """
    out, lse_log2 = problem.results()
    if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
        problem.check_values()
    end = int(problem.cu_seqlens_q[-1])
    out[end:] = 0
    if lse_log2 is not None:
        lse_log2[end:] = -math.inf
    for rows, keys, position in _blocks(problem):
        block_out, block_lse_log2 = _solve(problem, rows, keys, position)
        out[rows] = rounded(block_out, out.dtype)
        if lse_log2 is not None:
            lse_log2[rows] = block_lse_log2.to(lse_log2.dtype)
    return out, lse_log2


def _blocks(problem: RaggedAttention) -> Iterator[tuple[slice, slice, int]]:
    """Yield small blocks of query rows, so that the scores of a block fit in memory: the rows, all keys of their request, and
    the position of the first row.
    """
    q_offsets, kv_offsets = problem.cu_seqlens_q.tolist(), problem.cu_seqlens_kv.tolist()
    for request in range(problem.batch_size):
        q_start, q_end = q_offsets[request : request + 2]
        kv_start, kv_end = kv_offsets[request : request + 2]
        kv_len = kv_end - kv_start
        rows_at_once = max(1, piece_elements(problem.query.device) // (problem.num_qo_heads * max(kv_len, 1)))
        for first in range(q_start, q_end, rows_at_once):
            rows = slice(first, min(first + rows_at_once, q_end))
            yield rows, slice(kv_start, kv_end), kv_len - q_end + first


def _solve(problem: RaggedAttention, rows: slice, keys: slice, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of query rows over keys. Return out, float64 [rows, num_qo_heads, v_head_dim], and lse_log2, float64
    [rows, num_qo_heads].
    """
    device = problem.query.device
    kv_len = keys.stop - keys.start
    visible = visible_keys(
        torch.arange(position, position + rows.stop - rows.start, device=device).unsqueeze(0),
        torch.arange(kv_len, device=device).unsqueeze(0),
        torch.tensor([kv_len], device=device),
        causal=problem.causal,
        window_left=problem.window_left,
    )
    out, lse_log2 = unchecked_attention(
        problem.query[rows].unsqueeze(0),
        problem.key[keys].unsqueeze(0),
        problem.value[keys].unsqueeze(0),
        visible,
        problem,
    )
    return out[0], lse_log2[0]
