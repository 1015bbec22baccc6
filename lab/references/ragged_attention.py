"""Softmax attention in float64 over contiguous K/V: `lab.references.attention` for the rows of all requests."""

import math
from typing import Any

import torch

from lab.calls import takes
from lab.calls.entry import with_own_settings
from lab.calls.ragged_context import RaggedAttention, RaggedContextCall
from lab.references.softmax_attention import Rules, rounded, solved_requests


@takes(RaggedContextCall)
@with_own_settings
def trtllm_ragged_attention_deepseek(call: RaggedContextCall) -> Any:
    """Compute attention over contiguous K/V in float64. An MLA prefill with up-projected K and V (no absorbed weights) makes
    this call over the new tokens, and over chunks of the cached prefix.

    The arguments are the keyword arguments of FlashInfer 0.7.2's function, which `lab.calls.RaggedContextCall` documents. In
    addition, `out` may be float64, so that the result is not rounded, and head_dims may have any size. Wrong arguments raise an
    error before any arithmetic. The host reads lengths.

    Returns:
        out [num_rows, num_qo_heads, v_head_dim]; with `return_lse`, (out, lse), lse in base 2.
    """
    problem = call.problem()
    return problem.returned(*ragged_attention(problem))


def ragged_attention(problem: RaggedAttention) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (output; LSE in base 2, None if the call has none), rounded from float64. Padding rows: output 0, LSE -inf."""
    out, lse_log2 = problem.results()
    if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
        problem.check_values()
    problem = problem.dequantized()
    end = problem.row_offsets()[-1]
    out[end:] = 0
    if lse_log2 is not None:
        lse_log2[end:] = -math.inf
    solved = solved_requests(problem.query, problem.parts(), problem.q_lens(), Rules.of(problem))
    for rows, piece, piece_lse_log2, *_ in solved:
        out[rows] = rounded(piece, out.dtype)
        if lse_log2 is not None:
            lse_log2[rows] = piece_lse_log2.to(lse_log2.dtype)
    return out, lse_log2
