"""FlashInfer's TRT-LLM attention functions over a paged K/V cache in float64, with the same names and parameters.

K and V of some requests at a time are copied out of their pages, and `solved_requests` computes these requests' attention.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.calls import ContextCall, DecodeCall, DSV4DecodeCall, MLADecodeCall, Problem, takes
from lab.calls.entries import places_of_requests
from lab.calls.entry import with_own_settings
from lab.calls.problem import E4M3, PagedAttention, shown_draft_tokens
from lab.references.quantization import deinterleave_v_scale_factors, dequantize_nvfp4
from lab.references.softmax_attention import COPIED_ELEMENTS, History, Rules, rounded, solved_requests


@takes(DecodeCall)
@with_own_settings
def trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> Any:
    """Compute attention of the last query tokens of each request over its paged K/V: decode, verify, draft extend.

    `lab.calls.DecodeCall` documents parameters, shapes and dtypes, which are FlashInfer 0.7.2's, and errors, which are raised
    before any arithmetic. In addition, `out_dtype` may be float32 or float64, so that the result is not rounded. The host reads
    lengths and tables.

    Returns:
        out [num_rows, num_qo_heads, head_dim]; with `return_lse`, (out, lse), lse in base 2.
    """
    problem = call.problem()
    return problem.returned(*paged_attention(problem))


@takes(ContextCall)
@with_own_settings
def trtllm_batch_context_with_kv_cache(call: ContextCall) -> Any:
    """Compute attention of any number of newest query tokens of each request over its paged K/V: extend, prefill.

    `lab.calls.ContextCall` documents parameters, shapes and dtypes, which are FlashInfer 0.7.2's. Results and errors are as in
    `trtllm_batch_decode_with_kv_cache`.
    """
    problem = call.problem()
    return problem.returned(*paged_attention(problem))


@takes(MLADecodeCall)
@with_own_settings
def trtllm_batch_decode_with_kv_cache_mla(call: MLADecodeCall) -> Any:
    """Compute latent attention (MLA) of the last query tokens of each request over its paged cache, after absorption.

    `lab.calls.MLADecodeCall` documents parameters, shapes and dtypes, which are FlashInfer 0.7.2's, and errors, which are
    raised before any arithmetic. In addition, `out` may be float64, so that the result is not rounded, and latent vector,
    rotary part and page may have any size. The host reads lengths and tables.

    Returns:
        out, the query's shape with a last dimension of `kv_lora_rank`, bfloat16 unless `out` is given; with `return_lse`
        (out, lse), lse in the base that `MLADecodeCall.return_lse_base` says.
    """
    out, lse = paged_attention(call.problem())
    if lse is not None and call.lse_is_base_e:
        lse *= math.log(2.0)
    return call.returned(out, lse)


@takes(DSV4DecodeCall)
@with_own_settings
def trtllm_batch_decode_sparse_mla_dsv4(call: DSV4DecodeCall) -> Any:
    """Compute DeepSeek-V4's attention: each row attends to entries that it selects in two pools, in one softmax.

    `lab.calls.DSV4DecodeCall` documents parameters, shapes and dtypes, which are FlashInfer 0.7.2's, and errors, which are
    raised before any arithmetic. In addition, query and cache may have any dtype and size of `MLADecodeCall`, and `out` may be
    float64. The entries of both pools are copied.

    Returns:
        out, the query's shape, bfloat16 unless `out` is given.
    """
    out, _ = paged_attention(call.problem())
    return call.returned(out)


def paged_attention(problem: PagedAttention) -> tuple[Tensor, Tensor | None]:
    """Return (out, `problem.out_dtype` [num_rows, num_qo_heads, v_head_dim]; lse_log2, float32 [num_rows, num_qo_heads], or
    None) of a checked problem, computed in float64 and rounded once. Padding rows have the output zero and the LSE -inf,
    also with sinks. ValueError: `PagedAttention.check_values` refuses the contents of a tensor.
    """
    if len(problem.query) == 0:
        return problem.results()
    if problem.is_block_sparse:
        out, lse_log2 = problem.results()
        for of_head in replace(problem, out=out, lse=lse_log2).of_kv_heads():
            paged_attention(of_head)
        return out, lse_log2
    if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
        problem.check_values()
    problem = with_rows_as_requests(problem.of_one_pool())
    out, lse_log2 = problem.results()
    offsets = problem.row_offsets()
    out[offsets[-1] :] = 0
    if lse_log2 is not None:
        lse_log2[offsets[-1] :] = -math.inf
    for requests in _requests_at_once(problem):
        query, histories, q_lens, rules = softmax_inputs(problem, requests, histories_of(problem, requests))
        first_row = offsets[requests.start]
        for rows, piece, piece_lse_log2, *_ in solved_requests(query, histories, q_lens, rules):
            out[first_row + rows] = rounded(piece, out.dtype)
            if lse_log2 is not None:
                lse_log2[first_row + rows] = piece_lse_log2.to(lse_log2.dtype)
    return out, lse_log2


def with_rows_as_requests(problem: PagedAttention) -> PagedAttention:
    """Return an equal problem in which each query row is a request of its own if the rows of a request see different keys than
    a causal rule says: the first `num_visible` keys, or `selected` entries, each of which becomes a page of one token.
    """
    if problem.num_visible is not None:
        return problem.of_rows()
    if problem.selected is None:
        return problem
    cells = problem.columns_in_use() & (problem.selected >= 0)
    entries_first = (~cells).to(torch.int8).argsort(dim=1, stable=True)
    end = problem.row_offsets()[-1]  # later rows are padding
    places = problem.selected.gather(1, entries_first)[:end]
    k_cache, v_cache = (
        cache.transpose(1, 2).flatten(0, 1).unsqueeze(2) for cache in (problem.k_cache, problem.v_cache)
    )
    return replace(
        problem,
        selected=None,
        selected_lens=None,
        k_cache=k_cache,
        v_cache=v_cache,
        k_block_tables=places,
        v_block_tables=places,
        seq_lens=cells.sum(dim=1, dtype=torch.int32)[:end],
        cu_seqlens_q=torch.arange(end + 1, dtype=torch.int32, device=places.device),
        max_q_len=1,
    )


def _requests_at_once(problem: PagedAttention) -> Iterator[range]:
    """Yield ranges of requests that together have at most `COPIED_ELEMENTS` elements of K and V, or one request."""
    elements = problem.num_kv_heads * (problem.head_dim + problem.v_head_dim)  # of one key
    most_keys = COPIED_ELEMENTS[problem.query.device.type] // elements
    first = keys = 0
    for request, kv_len in enumerate(problem.kv_lens()):
        if request > first and keys + kv_len > most_keys:
            yield range(first, request)
            first, keys = request, 0
        keys += kv_len
    if first < problem.batch_size:
        yield range(first, problem.batch_size)


def histories_of(problem: Problem, requests: Sequence[int] | None = None) -> list[History]:
    """Return (K, V) of each request (None: of all), [kv_len, num_kv_heads, head_dim] each, read through the problem's page
    tables or offsets. If rows select entries, K and V have only the selected entries (`lab.calls.entries`).
    """
    chosen = range(problem.batch_size) if requests is None else requests
    if not isinstance(problem, PagedAttention):
        parts = problem.dequantized().parts()
        return [parts[request] for request in chosen]
    problem = problem.of_one_pool()
    if not len(chosen):
        return []
    k_places, v_places = zip(*places_of_requests(problem, chosen), strict=True)
    k = _entries(problem.k_cache, problem.k_scale_factors, torch.cat(k_places), problem.page_size)
    v = _entries(problem.v_cache, plain_v_scales(problem), torch.cat(v_places), problem.page_size)
    kv_lens = [len(places) for places in k_places]
    return list(zip(k.split(kv_lens), v.split(kv_lens), strict=True))


def softmax_inputs(
    problem: Problem, requests: Sequence[int], histories: Sequence[History], arithmetic: torch.dtype | None = None
) -> tuple[Tensor, Sequence[History], list[int], Rules]:
    """Return the arguments of `solved_requests` for some requests of a problem: query rows, (K, V) of each request (given as
    `histories`), number of rows of each request, and the rules by which rows attend to keys.
    """
    offsets, mask = problem.row_offsets(), problem.mask if isinstance(problem, PagedAttention) else None
    query = torch.cat([problem.query[offsets[request] : offsets[request + 1]] for request in requests])
    q_lens = [offsets[request + 1] - offsets[request] for request in requests]
    shown = None if mask is None else shown_draft_tokens(mask.to(torch.int32)[list(requests)])
    return query, histories, q_lens, Rules.of(problem, arithmetic, shown)


def _entries(cache: Tensor, scale_factors: Tensor | None, places: Tensor, page_size: int) -> Tensor:
    """Return the entries of a cache with the token indices `places`, [len(places), num_kv_heads, head_dim], dequantised."""
    slots = places // page_size, slice(None), places % page_size
    entries = cache[slots]
    if scale_factors is None:
        return entries
    return dequantize_nvfp4(entries, scale_factors[slots], torch.float32)  # exact: the values have six bits


def plain_v_scales(problem: PagedAttention) -> Tensor | None:
    """Return V's NVFP4 scale factors in token order (not interleaved), or None if the cache is not NVFP4."""
    if problem.v_scale_factors is None or not problem.v_scale_factors_interleaved:
        return problem.v_scale_factors
    return deinterleave_v_scale_factors(problem.v_scale_factors.view(torch.uint8)).view(E4M3)
