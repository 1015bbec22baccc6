"""FlashInfer's attention functions over a paged K/V cache in float64, with the same names and parameters."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from lab.calls import ContextCall, DecodeCall, DSV4DecodeCall, MLADecodeCall, Problem, takes
from lab.calls.entry import with_own_settings
from lab.references.softmax_attention import PIECE_ELEMENTS, rounded, solved_requests
from lab.references.truth import inputs_of, rows_of, selects_keys


@takes(DecodeCall)
@with_own_settings
def trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> Any:
    """Compute attention of the newest tokens of each request over its paged K/V in float64: decode, verify, draft extend.

    The arguments are the keyword arguments of FlashInfer 0.7.2's function, which `lab.calls.DecodeCall` documents. In addition,
    `out_dtype` may be float32 or float64, so that the result is not rounded. Wrong arguments raise an error before any
    arithmetic. The host reads lengths and tables.

    Returns:
        out [num_rows, num_qo_heads, head_dim]; with `return_lse`, (out, lse), lse float32 [num_rows, num_qo_heads], base 2.
    """
    problem = call.problem()
    return problem.returned(*attention_of(problem))


@takes(ContextCall)
@with_own_settings
def trtllm_batch_context_with_kv_cache(call: ContextCall) -> Any:
    """Compute attention of the newest tokens of each request, in any number, over its paged K/V in float64: extend, prefill.

    The arguments are the keyword arguments of FlashInfer 0.7.2's function, which `lab.calls.ContextCall` documents. In
    addition, `out_dtype` may be float32 or float64. Wrong arguments raise an error before any arithmetic. Returns out
    [num_rows, num_qo_heads, head_dim]; with `return_lse`, (out, lse), lse in base 2.
    """
    problem = call.problem()
    return problem.returned(*attention_of(problem))


@takes(MLADecodeCall)
@with_own_settings
def trtllm_batch_decode_with_kv_cache_mla(call: MLADecodeCall) -> Any:
    """Compute latent attention (MLA) of the newest tokens of each request over its paged cache in float64, after absorption.

    The arguments are the keyword arguments of FlashInfer 0.7.2's function, which `lab.calls.MLADecodeCall` documents. In
    addition, `out` may be float64, so that the result is not rounded, and latent vector, rotary part and page may have any
    size. Wrong arguments raise an error before any arithmetic. The host reads lengths and tables.

    Returns:
        out, the query's shape with a last dimension of `kv_lora_rank`, bfloat16 unless `out` is given; with `return_lse`
        (out, lse), lse in the base that `return_lse_base` selects.
    """
    out, lse = attention_of(call.problem())
    if lse is not None and call.lse_is_base_e:
        lse *= math.log(2.0)
    return call.returned(out, lse)


@takes(DSV4DecodeCall)
@with_own_settings
def trtllm_batch_decode_sparse_mla_dsv4(call: DSV4DecodeCall) -> Any:
    """Compute DeepSeek-V4's sparse attention in float64. Each query row attends, in one softmax, to the cache entries that its
    row of `sparse_indices` lists: recent tokens in `swa_kv_cache`, and compressed tokens in `compressed_kv_cache`.

    The arguments are the keyword arguments of FlashInfer 0.7.2's function, which `lab.calls.DSV4DecodeCall` documents. In
    addition, query and caches may be float16, float32 or float64, head_dim may have any size, and `out` may be float64. Wrong
    arguments raise an error before any arithmetic. Both caches are copied.

    Returns:
        out, the query's shape, bfloat16 unless `out` is given.
    """
    out, _ = attention_of(call.problem())
    return call.returned(out)


def attention_of(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Return (output, LSE in base 2 or None) of a checked problem, computed in float64 and rounded once. The output is
    [num_rows, num_qo_heads, v_head_dim] in `problem.out_dtype`, the LSE float32 [num_rows, num_qo_heads]. Padding rows have the
    output zero and the LSE -inf, also with sinks. Raises ValueError for a wrong length, offset or page id.
    """
    if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
        problem.check_values()
    out, lse_log2 = problem.results()
    for part in replace(problem, out=out, lse=lse_log2).of_kv_heads():
        _write_attention(part.simplified())
    return out, lse_log2


def _write_attention(problem: Problem) -> None:
    if selects_keys(problem):
        problem = problem.of_rows()
    (out, lse_log2), end = problem.results(), problem.row_offsets()[-1]
    out[end:] = 0
    if lse_log2 is not None:
        lse_log2[end:] = -math.inf
    for requests in _together(problem):
        rows = rows_of(problem, requests)
        for places, piece, piece_lse_log2, *_ in solved_requests(*inputs_of(problem, requests)):
            out[rows[places]] = rounded(piece, out.dtype)
            if lse_log2 is not None:
                lse_log2[rows[places]] = piece_lse_log2.to(lse_log2.dtype)


def _together(problem: Problem) -> Iterator[list[int]]:
    """Yield lists of requests, whose K and V are copied together, in ascending order of their lengths."""
    kv_lens, q_lens = problem.kv_lens(), problem.q_lens()
    most_keys = PIECE_ELEMENTS[problem.query.device.type] // (
        problem.num_kv_heads * (problem.head_dim + problem.v_head_dim)
    )
    chosen, keys = list[int](), 0
    for request in sorted(range(len(kv_lens)), key=lambda request: (kv_lens[request], q_lens[request])):
        keys += kv_lens[request]
        if chosen and keys > most_keys:
            yield chosen
            chosen, keys = [], kv_lens[request]
        chosen.append(request)
    if chosen:
        yield chosen
