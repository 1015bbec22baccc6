"""FlashInfer's TRT-LLM attention functions in Triton: any GPU that Triton compiles for, and a CPU in its interpreter.

One kernel serves decode, verify, draft extend and extend; latent attention (MLA) has its own, in `portable_mla`, and so has
MLA's prefill before absorption, in `portable_ragged`. The query rows of a request and the query heads that share a K/V head
are packed into one tile, so K/V is read once for all of them; long requests are split over programs whose partial results a
second kernel merges. Lengths stay on the device: nothing is read back, and no length is compiled in.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from lab.calls import ContextCall, DecodeCall, takes
from lab.kernels.portable_mla import trtllm_batch_decode_with_kv_cache_mla
from lab.kernels.portable_ragged import trtllm_ragged_attention_deepseek
from lab.kernels.support import Kernel, refuse_unsupported, triton_interprets
from lab.kernels.triton_support import (
    LOG2_E,
    PartialResults,
    Tile,
    add_sink,
    choose_splits,
    dot,
    dot_dtype,
    has_rows,
    log2_sum,
    num_multiprocessors,
    own_share,
    rounded,
    scalar,
    softmax_step,
)
from lab.problem import PagedAttention

__all__ = [
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_ragged_attention_deepseek",
]


@takes(DecodeCall)
def trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> Any:
    """Attention of the last query tokens of each request over its paged K/V: decode, verify, draft extend.

    Parameters, shapes, dtypes and errors are `lab.calls.DecodeCall`'s; what this kernel does not take raises
    NotImplementedError with the reason of `lab.kernels.support.why_not`. On a GPU, lengths and page ids are not read:
    `lab.problem.check_values` checks them on request. Accumulates in float32; `workspace_buffer` is not used.

    Returns:
        out [num_rows, num_qo_heads, head_dim]; with `return_lse`, (out, lse), lse in base 2.
    """
    return _run(call.problem())


@takes(ContextCall)
def trtllm_batch_context_with_kv_cache(call: ContextCall) -> Any:
    """Attention of each request's newest query tokens, as many as it has, over its paged K/V: extend and prefill.

    Parameters, shapes, dtypes and errors are `lab.calls.ContextCall`'s; the rest is as in
    `trtllm_batch_decode_with_kv_cache`.
    """
    return _run(call.problem())


def choose_tile(num_packed_rows: int, head_dim: int) -> Tile:
    """The tile for requests of at most `num_packed_rows` = max_q_len * group rows.

    16 rows are the least a matrix unit takes. Up to 64 rows the call is bound by reading K/V: a tile as small as the rows
    allow, many keys in flight. Beyond, it is bound by the products: 128 rows and 8 warps. On an H200, decode of 16 requests
    at 32,768 keys (32/8 heads of 128) took 641 µs with 64 keys per step and 3 stages, 497 µs with 128 and 2.
    """
    rows = min(max(16, triton.next_power_of_2(num_packed_rows)), 128)
    keys = 128 if head_dim <= 128 else 32
    if rows <= 64:
        return Tile(rows, keys, num_warps=4, num_stages=2)
    return Tile(rows, min(keys, 64), num_warps=8, num_stages=3 if head_dim <= 128 else 2)


def _run(problem: PagedAttention) -> Any:
    out, lse_log2 = problem.results()
    if not has_rows(problem):
        return problem.returned(out, lse_log2)
    refuse_unsupported(Kernel.PORTABLE, problem)
    with torch.cuda.device_of(problem.query):  # Triton launches on the current device
        _launch(problem, out, lse_log2)
    return problem.returned(out, lse_log2)


def _launch(problem: PagedAttention, out: torch.Tensor, lse_log2: torch.Tensor | None) -> None:
    device = problem.query.device
    group = problem.num_qo_heads // problem.num_kv_heads
    tile = choose_tile(problem.max_q_len * group, problem.head_dim)
    q_blocks = triton.cdiv(problem.max_q_len * group, tile.rows)
    table_tokens = problem.k_block_tables.shape[1] * problem.page_size
    splits = choose_splits(
        problem.batch_size,
        q_blocks,
        problem.num_kv_heads,
        triton.cdiv(min(problem.max_kv_len, table_tokens), tile.keys),
        num_multiprocessors(device),
    )
    num_splits = splits.most
    partial = PartialResults.empty(problem, num_splits) if num_splits > 1 else None
    _attention_kernel[(q_blocks * num_splits, problem.num_kv_heads, problem.batch_size)](
        problem.query,
        problem.k_cache,
        problem.v_cache,
        problem.k_block_tables,
        problem.v_block_tables,
        problem.seq_lens,
        problem.cu_seqlens_q,
        problem.sinks,
        problem.mask,
        problem.bmm1_scale,
        problem.bmm2_scale,
        out if partial is None else partial.out,
        lse_log2 if partial is None else partial.lse_log2,
        problem.num_rows,
        problem.max_q_len,
        problem.window_left,
        problem.batch_size,
        splits.total,
        num_splits,
        problem.num_qo_heads,
        *problem.query.stride()[:2],
        *problem.k_cache.stride()[:3],
        *problem.v_cache.stride()[:3],
        problem.k_block_tables.stride(0),
        problem.v_block_tables.stride(0),
        GROUP=group,
        HEAD_DIM=problem.head_dim,
        PAGE_SIZE=problem.page_size,
        MASK_WORDS=0 if problem.mask is None else problem.mask.shape[2],
        CAUSAL=problem.causal,
        HAS_SPLITS=num_splits > 1,
        BLOCK_ROWS=tile.rows,
        BLOCK_KEYS=tile.keys,
        DOT_DTYPE=dot_dtype(problem.query),
        BMM1_IS_TENSOR=isinstance(problem.bmm1_scale, torch.Tensor),
        BMM2_IS_TENSOR=isinstance(problem.bmm2_scale, torch.Tensor),
        INTERPRETED=triton_interprets(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if partial is not None:
        partial.merge(problem, out, lse_log2)


# What varies from call to call must not compile again, not even for its value 1 or its multiples of 16.
@triton.jit(
    do_not_specialize=[
        "num_rows",
        "max_q_len",
        "window_left",
        "batch_size",
        "total_splits",
        "num_splits",
        "num_qo_heads",
    ]
)
def _attention_kernel(
    query,
    k_cache,
    v_cache,
    k_block_tables,
    v_block_tables,
    seq_lens,
    cu_seqlens_q,  # None: every request has max_q_len rows
    sinks,  # None: no sink
    mask,
    bmm1_scale,
    bmm2_scale,
    out,  # the output; with splits, float32 [num_splits, num_rows, heads, head_dim]
    lse_log2,  # None: not wanted; with splits, float32 [num_splits, num_rows, heads]
    num_rows,
    max_q_len,
    window_left,
    batch_size,
    total_splits,  # of all requests together, shared out by length
    num_splits,  # most of one request
    num_qo_heads,
    query_row_stride,
    query_head_stride,
    k_page_stride,
    k_head_stride,
    k_token_stride,
    v_page_stride,
    v_head_stride,
    v_token_stride,
    k_table_stride,
    v_table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASK_WORDS: tl.constexpr,  # 0: no mask
    CAUSAL: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BMM1_IS_TENSOR: tl.constexpr,
    BMM2_IS_TENSOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One block of packed rows of one K/V head of one request, over one split of its keys."""
    q_block = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    # Times a stride, these may exceed 32 bits.
    kv_head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)

    if cu_seqlens_q is None:
        q_start = request * max_q_len
        q_len = max_q_len
    else:
        q_start = tl.load(cu_seqlens_q + request)
        q_len = tl.load(cu_seqlens_q + request + 1) - q_start
    if q_block * BLOCK_ROWS >= q_len * GROUP:
        return
    kv_len = tl.load(seq_lens + request).to(tl.int32)

    # Packed row r is query token r // GROUP, head r % GROUP of this K/V head's group.
    packed = q_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    row_exists = token < q_len
    q_position = kv_len - q_len  # of the request's first query token; negative where it has fewer keys than rows
    position = q_position + token
    row = (q_start + token).to(tl.int64)
    row_head = (split * num_rows + row) * num_qo_heads + head

    own_splits = num_splits
    if HAS_SPLITS:
        most_keys = tl.where(window_left >= 0, window_left + max_q_len, 0x7FFFFFFF)
        own_splits = own_share(seq_lens, kv_len, most_keys, batch_size, total_splits, num_splits)
        if split >= own_splits:
            tl.store(lse_log2 + row_head, tl.full([BLOCK_ROWS], float("-inf"), tl.float32), mask=row_exists)
            return

    dims = tl.arange(0, HEAD_DIM)
    q = tl.load(
        query + row[:, None] * query_row_stride + head[:, None] * query_head_stride + dims[None, :],
        mask=row_exists[:, None],
        other=0.0,
    ).to(DOT_DTYPE)

    # The span of keys that any row of the block may see, then this split's share of it.
    first_key = 0
    key_end = kv_len
    if CAUSAL and MASK_WORDS == 0:
        last_token = tl.minimum((q_block * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, q_len - 1)
        key_end = tl.minimum(kv_len, tl.maximum(q_position + last_token + 1, 0))
    if window_left >= 0:
        first_token = (q_block * BLOCK_ROWS) // GROUP
        first_key = tl.maximum(q_position + first_token - window_left, 0)
    key_start = first_key // BLOCK_KEYS * BLOCK_KEYS
    num_steps = tl.cdiv(tl.maximum(key_end - key_start, 0), BLOCK_KEYS)
    steps_per_split = tl.cdiv(num_steps, own_splits)
    split_start = key_start + split * steps_per_split * BLOCK_KEYS
    split_end = tl.minimum(split_start + steps_per_split * BLOCK_KEYS, key_end)

    scale_log2 = scalar(bmm1_scale, BMM1_IS_TENSOR) * LOG2_E
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, HEAD_DIM], tl.float32)
    for start in range(split_start, split_end, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        key_exists = (key >= first_key) & (key < split_end)
        slot = key % PAGE_SIZE
        k_page = tl.load(k_block_tables + request * k_table_stride + key // PAGE_SIZE, mask=key_exists, other=0)
        k_offset = k_page.to(tl.int64) * k_page_stride + kv_head * k_head_stride + slot * k_token_stride
        k = tl.load(k_cache + k_offset[None, :] + dims[:, None], mask=key_exists[None, :], other=0.0)
        scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
        scores = dot(q, k.to(DOT_DTYPE), scores, INTERPRETED) * scale_log2

        visible = row_exists[:, None] & key_exists[None, :]
        if MASK_WORDS > 0:
            is_draft = key >= q_position
            draft = tl.maximum(key - q_position, 0)  # index among the draft tokens
            word = tl.load(
                mask + (request * max_q_len + token)[:, None] * MASK_WORDS + (draft // 16)[None, :],
                mask=visible & is_draft[None, :],
                other=0,
            )
            shown = ((word.to(tl.int32) >> (draft % 16)[None, :]) & 1) != 0
            visible = visible & (shown | ~is_draft[None, :])
        elif CAUSAL:
            visible = visible & (key[None, :] <= position[:, None])
        if window_left >= 0:
            visible = visible & (key[None, :] >= position[:, None] - window_left)
        scores = tl.where(visible, scores, float("-inf"))

        weights, rescale, largest, denominator = softmax_step(scores, largest, denominator)

        v_page = tl.load(v_block_tables + request * v_table_stride + key // PAGE_SIZE, mask=key_exists, other=0)
        v_offset = v_page.to(tl.int64) * v_page_stride + kv_head * v_head_stride + slot * v_token_stride
        v = tl.load(v_cache + v_offset[:, None] + dims[None, :], mask=key_exists[:, None], other=0.0)
        weights = rounded(weights, DOT_DTYPE, INTERPRETED)
        sums = dot(weights, v.to(DOT_DTYPE), sums * rescale[:, None], INTERPRETED)

    if not HAS_SPLITS:
        if sinks is not None:
            sink_log2 = tl.load(sinks + head, mask=row_exists, other=0.0) * LOG2_E
            rescale, largest, denominator = add_sink(sink_log2, largest, denominator)
            sums = sums * rescale[:, None]
        sums = sums * scalar(bmm2_scale, BMM2_IS_TENSOR)
    divisor = tl.where(denominator == 0, 1.0, denominator)
    result = sums / divisor[:, None]
    result = rounded(result, out.dtype.element_ty, INTERPRETED)
    tl.store(out + row_head[:, None] * HEAD_DIM + dims[None, :], result, mask=row_exists[:, None])
    if lse_log2 is not None:
        tl.store(lse_log2 + row_head, log2_sum(largest, denominator), mask=row_exists)
