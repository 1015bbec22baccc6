"""Softmax attention in float64 over contiguous K/V: `lab.references.attention` for the rows of all requests."""

import itertools
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
    """Compute attention of each request's rows over contiguous K/V: the new tokens of an MLA prefill before absorption, or a
    chunk of their prefix.

    `lab.calls.RaggedContextCall` documents parameters, shapes and dtypes, which are FlashInfer 0.7.2's, and errors, which are
    raised before any arithmetic. In addition, `out` may be float64, so that the result is not rounded, and head_dims may have
    any size. The host reads lengths.

    Returns:
        out [num_rows, num_qo_heads, v_head_dim]; with `return_lse`, (out, lse), lse in base 2.
    """
    problem = call.problem()
    return problem.returned(*ragged_attention(problem))


def ragged_attention(problem: RaggedAttention) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (out, LSE in base 2 or None), computed in float64 and rounded once. Padding rows have output zero and LSE -inf."""
    out, lse_log2 = problem.results()
    if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
        problem.check_values()
    problem = problem.dequantized()
    offsets = problem.row_offsets()
    out[offsets[-1] :] = 0
    if lse_log2 is not None:
        lse_log2[offsets[-1] :] = -math.inf
    q_lens = [end - start for start, end in itertools.pairwise(offsets)]
    solved = solved_requests(problem.query, problem.parts(), q_lens, Rules.of(problem))
    for rows, piece, piece_lse_log2, *_ in solved:
        out[rows] = rounded(piece, out.dtype)
        if lse_log2 is not None:
            lse_log2[rows] = piece_lse_log2.to(lse_log2.dtype)
    return out, lse_log2
