"""FlashInfer's two TRT-LLM attention functions in Triton: any GPU that Triton compiles for, and a CPU in its interpreter.

One kernel serves decode, verify, draft extend and extend. The query rows of a request and the query heads that share a
K/V head are packed into one tile, so K/V is read once for all of them; long requests are split over programs whose
partial results a second kernel merges. Lengths stay on the device: nothing is read back, and no length is compiled in.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from lab.calls import ContextCall, DecodeCall, takes
from lab.kernels.support import Kernel, refuse_unsupported, triton_interprets
from lab.problem import PagedAttention

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

# Programs per multiprocessor that the split of long requests aims at: enough to hide latency, few enough to merge cheaply.
PROGRAMS_PER_MULTIPROCESSOR = 2
MAX_SPLITS = 64
# Pieces per request that a full GPU still gets, so that long requests can be cut; and how many times the fair share of
# pieces one request may have, which bounds the empty programs of the others. On an H200, decode of 64 requests with a real
# trace's lengths took 2,630 µs without a cut, 1,004 µs with 2 pieces per request and 958 µs with 4 (963 µs is the floor).
PIECES_PER_REQUEST = 4
UNEVENNESS = 16
# A CPU has no multiprocessors; a small stand-in lets the interpreter run the split path too.
INTERPRETED_MULTIPROCESSORS = 2


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


@dataclass(frozen=True)
class Tile:
    """Shape of one program: packed query rows, keys per step, and Triton's launch options."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


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


@dataclass(frozen=True)
class Splits:
    """How the keys of a batch are cut: `total` pieces shared out by length, at most `most` for one request."""

    total: int
    most: int


def choose_splits(
    batch_size: int, q_blocks: int, num_kv_heads: int, num_key_steps: int, num_multiprocessors: int
) -> Splits:
    """The pieces that a call's keys are cut into. Who gets how many is decided on the device, where the lengths are.

    A call whose queries fill one tile per K/V head (decode, verify, draft extend) may cut a request that is longer than
    others into many pieces even when the batch alone fills the GPU; a longer prompt's tiles have filled it already.

    Args:
        batch_size: requests.
        q_blocks, num_kv_heads: their product is the number of programs per request without a cut.
        num_key_steps: most steps of one program over the keys, from the host's bound of the lengths.
        num_multiprocessors: of the device.
    """
    total = -(-PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // (q_blocks * num_kv_heads))
    if q_blocks == 1:
        total = max(total, PIECES_PER_REQUEST * batch_size)
    fair_share = -(-total // batch_size)
    most = UNEVENNESS * fair_share if q_blocks == 1 else fair_share
    return Splits(total, max(1, min(most, num_key_steps, MAX_SPLITS)))


def _run(problem: PagedAttention) -> Any:
    out, lse_log2 = problem.results()
    if problem.num_rows == 0:
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
        _num_multiprocessors(device),
    )
    num_splits = splits.most
    # Partial results are normalised, so that the merge needs their log-sum-exp alone.
    partial_out = partial_lse_log2 = None
    if num_splits > 1:
        shape = (num_splits, problem.num_rows, problem.num_qo_heads)
        partial_out = torch.empty((*shape, problem.head_dim), dtype=torch.float32, device=device)
        partial_lse_log2 = torch.empty(shape, dtype=torch.float32, device=device)
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
        out if partial_out is None else partial_out,
        lse_log2 if partial_lse_log2 is None else partial_lse_log2,
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
        BLOCK_REQUESTS=triton.next_power_of_2(problem.batch_size),
        BLOCK_ROWS=tile.rows,
        BLOCK_KEYS=tile.keys,
        DOT_DTYPE=tl.float16 if problem.query.dtype == torch.float16 else tl.bfloat16,
        BMM1_IS_TENSOR=isinstance(problem.bmm1_scale, torch.Tensor),
        BMM2_IS_TENSOR=isinstance(problem.bmm2_scale, torch.Tensor),
        INTERPRETED=triton_interprets(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        _merge_kernel[(problem.num_rows, problem.num_qo_heads)](
            partial_out,
            partial_lse_log2,
            problem.sinks,
            problem.bmm2_scale,
            out,
            lse_log2,
            problem.num_rows,
            num_splits,
            problem.num_qo_heads,
            HEAD_DIM=problem.head_dim,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits),
            BMM2_IS_TENSOR=isinstance(problem.bmm2_scale, torch.Tensor),
            INTERPRETED=triton_interprets(),
            num_warps=1,
        )


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _scalar(scale, IS_TENSOR: tl.constexpr):
    """A scale given as a number, or as a tensor of one element."""
    return tl.load(scale) if IS_TENSOR else scale


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 `x` in DTYPE, to nearest even; e4m3 saturates, and keeps NaN."""
    if tl.float8e4nv == DTYPE:
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    if INTERPRETED:  # Triton 3.7's interpreter would truncate
        if tl.bfloat16 == DTYPE:
            x = _without_bits(x, 16)
        if tl.float8e4nv == DTYPE:
            # Below 2 ** -6, e4m3's steps are 2 ** -9, which are those of float32 at 1.5 * 2 ** 14.
            x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, _without_bits(x, 20))
    return x.to(DTYPE)


@triton.jit
def _without_bits(x, COUNT: tl.constexpr):
    """float32 `x` rounded to nearest even where its last COUNT bits are zero."""
    bits = x.to(tl.int32, bitcast=True)
    bits += (1 << (COUNT - 1)) - 1 + ((bits >> COUNT) & 1)
    return (bits & -(1 << COUNT)).to(tl.float32, bitcast=True)


@triton.jit
def _dot(a, b, sums, INTERPRETED: tl.constexpr):
    """`sums + a @ b` with float32 sums."""
    if INTERPRETED:  # Triton 3.7's interpreter would multiply the bit patterns of bf16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums)


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
    BLOCK_REQUESTS: tl.constexpr,
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
        # A request has the share of the splits that it has of the keys.
        requests = tl.arange(0, BLOCK_REQUESTS)
        kv_lens = tl.load(seq_lens + requests, mask=requests < batch_size, other=0).to(tl.int64)
        share = kv_len.to(tl.int64)
        if window_left >= 0:
            kv_lens = tl.minimum(kv_lens, window_left + max_q_len)
            share = tl.minimum(share, window_left + max_q_len)
        all_keys = tl.maximum(tl.sum(kv_lens, 0), 1)
        own_splits = ((share * total_splits + all_keys // 2) // all_keys).to(tl.int32)
        own_splits = tl.minimum(tl.maximum(own_splits, 1), num_splits)
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

    scale_log2 = _scalar(bmm1_scale, BMM1_IS_TENSOR) * LOG2_E
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
        scores = _dot(q, k.to(DOT_DTYPE), scores, INTERPRETED) * scale_log2

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

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet has no maximum to subtract.
        origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - origin[:, None])
        rescale = tl.exp2(largest - origin)
        denominator = denominator * rescale + tl.sum(weights, 1)
        largest = new_largest

        v_page = tl.load(v_block_tables + request * v_table_stride + key // PAGE_SIZE, mask=key_exists, other=0)
        v_offset = v_page.to(tl.int64) * v_page_stride + kv_head * v_head_stride + slot * v_token_stride
        v = tl.load(v_cache + v_offset[:, None] + dims[None, :], mask=key_exists[:, None], other=0.0)
        weights = _rounded(weights, DOT_DTYPE, INTERPRETED)
        sums = _dot(weights, v.to(DOT_DTYPE), sums * rescale[:, None], INTERPRETED)

    if not HAS_SPLITS:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=row_exists, other=0.0) * LOG2_E
            new_largest = tl.maximum(largest, sink)
            origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            rescale = tl.exp2(largest - origin)
            denominator = denominator * rescale + tl.exp2(sink - origin)
            sums = sums * rescale[:, None]
            largest = new_largest
        sums = sums * _scalar(bmm2_scale, BMM2_IS_TENSOR)
    divisor = tl.where(denominator == 0, 1.0, denominator)
    result = sums / divisor[:, None]
    result = _rounded(result, out.dtype.element_ty, INTERPRETED)
    tl.store(out + row_head[:, None] * HEAD_DIM + dims[None, :], result, mask=row_exists[:, None])
    if lse_log2 is not None:
        # A NaN stays one: it must not pass for a row without keys.
        value = tl.where(denominator == 0, float("-inf"), largest + tl.log2(divisor))
        tl.store(lse_log2 + row_head, value, mask=row_exists)


@triton.jit(do_not_specialize=["num_rows", "num_splits", "num_qo_heads"])
def _merge_kernel(
    partial_out,  # float32 [num_splits, num_rows, heads, head_dim]
    partial_lse_log2,  # float32 [num_splits, num_rows, heads]
    sinks,
    bmm2_scale,
    out,
    lse_log2,
    num_rows,
    num_splits,
    num_qo_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BMM2_IS_TENSOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Merge one row and head: the splits' outputs weighted by 2 ** their log-sum-exp, the sink counted once."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, HEAD_DIM)
    exists = splits < num_splits
    row_heads = (splits * num_rows + row) * num_qo_heads + head
    lses = tl.load(partial_lse_log2 + row_heads, mask=exists, other=float("-inf"))
    largest = tl.max(lses, 0)
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2_E
        largest = tl.maximum(largest, sink)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(lses - origin)
    denominator = tl.sum(weights, 0)
    if sinks is not None:
        denominator += tl.exp2(sink - origin)
    # A split without keys has written no output.
    has_keys = (lses != float("-inf"))[:, None]
    parts = tl.load(partial_out + row_heads[:, None] * HEAD_DIM + dims[None, :], mask=has_keys, other=0.0)
    divisor = tl.where(denominator == 0, 1.0, denominator)
    result = tl.sum(parts * weights[:, None], 0) * _scalar(bmm2_scale, BMM2_IS_TENSOR) / divisor
    result = _rounded(result, out.dtype.element_ty, INTERPRETED)
    tl.store(out + (row * num_qo_heads + head) * HEAD_DIM + dims, result)
    if lse_log2 is not None:
        value = tl.where(denominator == 0, float("-inf"), largest + tl.log2(divisor))
        tl.store(lse_log2 + row * num_qo_heads + head, value)
