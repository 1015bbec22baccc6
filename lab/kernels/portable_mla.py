"""FlashInfer's MLA decode call in Triton: any GPU that Triton compiles for, and a CPU in its interpreter.

After absorption all query heads read the same cache entries, whose latent part is key and value at once. The query rows of
a request and all heads are packed into one tile, and each tile of entries is loaded once and used for both products. Long
requests are split over programs whose partial results a second kernel merges, as in `lab.kernels.portable`.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from lab.calls import takes
from lab.kernels.support import Capability, Kernel, capability_of, refuse_unsupported, triton_interprets
from lab.kernels.triton_support import (
    LOG2_E,
    PartialResults,
    Splits,
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
from lab.mla_call import MLADecodeCall
from lab.problem import PagedAttention

# Rows of a tile that fit a program's shared memory, by the GPU's major capability, else 16: SM90 and SM100 have 227 KiB, but
# for SM100 Triton 3.7.1 wants 281 for 64 rows; SM80 has 163, SM89 and SM120 have 99.
MOST_ROWS = {9: 64, 10: 32}
# Fewest keys worth a piece of their own: its partial results are written and read again, 64 kB for 16 rows of 512 float32
# elements, against 147 kB of bf16 entries. Reckoned, not measured.
LEAST_KEYS_PER_PIECE = 128
# Most scratch of the split: with many rows of 512 float32 elements it is the number of pieces that gives way.
MOST_PARTIAL_BYTES = 2**30


@takes(MLADecodeCall)
def trtllm_batch_decode_with_kv_cache_mla(call: MLADecodeCall) -> Any:
    """Latent attention (MLA) of the last query tokens of each request over its paged cache, after absorption.

    Parameters, shapes, dtypes and errors are `lab.mla_call.MLADecodeCall`'s; what this kernel does not take raises
    NotImplementedError with the reason of `lab.kernels.support.why_not`. On a GPU, lengths and page ids are not read:
    `lab.problem.check_values` checks them on request. Products are in the query's dtype, bf16 for e4m3, and sums in
    float32; `workspace_buffer` is not used. Rows behind the last request's are left as they are, or undefined.

    Returns:
        out, the query's shape with a last dimension of `kv_lora_rank`, bfloat16 unless `out` is given; with `return_lse`
        (out, lse), lse in base 2 unless `return_lse_base` is "basee".
    """
    problem = call.problem()
    out, lse = problem.results()
    if has_rows(problem):
        refuse_unsupported(Kernel.PORTABLE_MLA, problem)
        with torch.cuda.device_of(problem.query):  # Triton launches on the current device
            _launch(problem, out, lse)
    if lse is not None and call.return_lse_base == "basee":
        lse *= math.log(2.0)
    return call.returned(out, lse)


def choose_mla_tile(num_packed_rows: int, capability: Capability | None) -> Tile:
    """The tile for requests of at most `num_packed_rows` = max_q_len * num_qo_heads rows.

    Registers and shared memory decide, at a kv_lora_rank of 512. The sums of 64 rows are half the register file of an SM90
    multiprocessor, so that 128 would not fit; more rows become more blocks, which re-read the entries through L2. What
    Triton 3.7.1's compiler makes of bf16 for SM90 (compiled only: no time measured):

    * 16 rows, the least a matrix unit takes: 183 registers, 94 kB, so that two programs share a multiprocessor. 5 stages
      hold two tiles of entries, since Triton gives the page ids stages of their own; 3 would hold one.
    * 32 rows: 248 registers, 189 kB.
    * 64 rows, the least of Hopper's asynchronous products: 255 registers and a few spilled, 222 kB.

    Args:
        num_packed_rows: most rows of one request.
        capability: (major, minor) of the GPU, whose shared memory bounds the rows; the interpreter, None, runs SM90's.
    """
    most_rows = MOST_ROWS.get(9 if capability is None else capability[0], 16)
    rows = min(max(16, triton.next_power_of_2(num_packed_rows)), most_rows)
    if rows == 16:
        return Tile(rows, keys=32, num_warps=4, num_stages=5)
    return Tile(rows, keys=64, num_warps=8, num_stages=5 if rows == 32 else 3)


def choose_mla_splits(problem: PagedAttention, tile: Tile, q_blocks: int) -> Splits:
    """The pieces that the call's keys are cut into, their partial results in MOST_PARTIAL_BYTES unless one exceeds it."""
    table_tokens = problem.k_block_tables.shape[1] * problem.page_size
    splits = choose_splits(
        problem.batch_size,
        1,  # a decode's blocks of rows are no longer prompt: they read the same keys, as K/V heads of other calls do
        q_blocks,
        triton.cdiv(min(problem.max_kv_len, table_tokens), max(tile.keys, LEAST_KEYS_PER_PIECE)),
        num_multiprocessors(problem.query.device),
    )
    bytes_per_split = 4 * problem.num_rows * problem.num_qo_heads * problem.v_head_dim
    return Splits(splits.total, max(1, min(splits.most, MOST_PARTIAL_BYTES // bytes_per_split)))


def _launch(problem: PagedAttention, out: torch.Tensor, lse_log2: torch.Tensor | None) -> None:
    packed_rows = problem.max_q_len * problem.num_qo_heads
    tile = choose_mla_tile(packed_rows, capability_of(problem.query.device))
    q_blocks = triton.cdiv(packed_rows, tile.rows)
    splits = choose_mla_splits(problem, tile, q_blocks)
    num_splits = splits.most
    partial = PartialResults.empty(problem, num_splits) if num_splits > 1 else None
    _mla_kernel[(q_blocks * num_splits, problem.batch_size)](
        problem.query,
        problem.k_cache,
        problem.k_block_tables,
        problem.seq_lens,
        problem.cu_seqlens_q,
        problem.sinks,
        problem.bmm1_scale,
        problem.bmm2_scale,
        out if partial is None else partial.out,
        lse_log2 if partial is None else partial.lse_log2,
        problem.num_rows,
        problem.max_q_len,
        problem.batch_size,
        q_blocks,
        splits.total,
        num_splits,
        *problem.query.stride()[:2],
        problem.k_cache.stride(0),
        problem.k_cache.stride(2),
        problem.k_block_tables.stride(0),
        HEADS=problem.num_qo_heads,
        RANK=problem.v_head_dim,
        ROPE=problem.head_dim - problem.v_head_dim,
        PAGE_SIZE=problem.page_size,
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
        "batch_size",
        "q_blocks",
        "total_splits",
        "num_splits",
        "table_stride",
    ]
)
def _mla_kernel(
    query,
    kv_cache,
    block_tables,
    seq_lens,
    cu_seqlens_q,  # None: every request has max_q_len rows
    sinks,  # None: no sink
    bmm1_scale,
    bmm2_scale,
    out,  # the output; with splits, float32 [num_splits, num_rows, HEADS, RANK]
    lse_log2,  # None: not wanted; with splits, float32 [num_splits, num_rows, HEADS]
    num_rows,
    max_q_len,
    batch_size,
    q_blocks,
    total_splits,  # of all requests together, shared out by length
    num_splits,  # most of one request
    query_row_stride,
    query_head_stride,
    page_stride,
    token_stride,
    table_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BMM1_IS_TENSOR: tl.constexpr,
    BMM2_IS_TENSOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One block of packed rows of one request, over one split of its keys."""
    # The blocks of one split read the same entries: side by side, all but the first find them in L2.
    q_block = tl.program_id(0) % q_blocks
    split = tl.program_id(0) // q_blocks
    request = tl.program_id(1).to(tl.int64)  # times a stride, it may exceed 32 bits

    if cu_seqlens_q is None:
        q_start = request * max_q_len
        q_len = max_q_len
    else:
        q_start = tl.load(cu_seqlens_q + request)
        q_len = tl.load(cu_seqlens_q + request + 1) - q_start
    if q_block * BLOCK_ROWS >= q_len * HEADS:
        return
    kv_len = tl.load(seq_lens + request).to(tl.int32)

    # Packed row r is query token r // HEADS, head r % HEADS.
    packed = q_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = packed // HEADS
    head = packed % HEADS
    row_exists = token < q_len
    position = kv_len - q_len + token  # negative where a request has fewer keys than rows
    row = (q_start + token).to(tl.int64)
    row_head = (split * num_rows + row) * HEADS + head

    own_splits = num_splits
    if HAS_SPLITS:
        own_splits = own_share(seq_lens, kv_len, 0x7FFFFFFF, batch_size, total_splits, num_splits)
        if split >= own_splits:
            tl.store(lse_log2 + row_head, tl.full([BLOCK_ROWS], float("-inf"), tl.float32), mask=row_exists)
            return

    latent_dims = tl.arange(0, RANK)
    rope_dims = RANK + tl.arange(0, ROPE)
    q_row = query + row[:, None] * query_row_stride + head[:, None] * query_head_stride
    q_latent = tl.load(q_row + latent_dims[None, :], mask=row_exists[:, None], other=0.0).to(DOT_DTYPE)
    q_rope = tl.load(q_row + rope_dims[None, :], mask=row_exists[:, None], other=0.0).to(DOT_DTYPE)

    # The keys that the block's last row sees, then this split's share of them.
    last_token = tl.minimum((q_block * BLOCK_ROWS + BLOCK_ROWS - 1) // HEADS, q_len - 1)
    key_end = tl.maximum(kv_len - q_len + last_token + 1, 0)
    steps_per_split = tl.cdiv(tl.cdiv(key_end, BLOCK_KEYS), own_splits)
    split_start = split * steps_per_split * BLOCK_KEYS
    split_end = tl.minimum(split_start + steps_per_split * BLOCK_KEYS, key_end)

    scale_log2 = scalar(bmm1_scale, BMM1_IS_TENSOR) * LOG2_E
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, RANK], tl.float32)
    for start in range(split_start, split_end, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        key_exists = key < split_end
        page = tl.load(block_tables + request * table_stride + key // PAGE_SIZE, mask=key_exists, other=0)
        entry = kv_cache + (page.to(tl.int64) * page_stride + (key % PAGE_SIZE).to(tl.int64) * token_stride)[:, None]
        latent = tl.load(entry + latent_dims[None, :], mask=key_exists[:, None], other=0.0).to(DOT_DTYPE)
        rope = tl.load(entry + rope_dims[None, :], mask=key_exists[:, None], other=0.0).to(DOT_DTYPE)

        scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
        scores = dot(q_rope, tl.trans(rope), scores, INTERPRETED)
        scores = dot(q_latent, tl.trans(latent), scores, INTERPRETED) * scale_log2
        # A row that does not exist has zeros for a query; what it sees is stored nowhere.
        visible = key_exists[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        weights, rescale, largest, denominator = softmax_step(scores, largest, denominator)
        weights = rounded(weights, DOT_DTYPE, INTERPRETED)
        sums = dot(weights, latent, sums * rescale[:, None], INTERPRETED)

    if not HAS_SPLITS:
        if sinks is not None:
            sink_log2 = tl.load(sinks + head, mask=row_exists, other=0.0) * LOG2_E
            rescale, largest, denominator = add_sink(sink_log2, largest, denominator)
            sums = sums * rescale[:, None]
        sums = sums * scalar(bmm2_scale, BMM2_IS_TENSOR)
    divisor = tl.where(denominator == 0, 1.0, denominator)
    result = rounded(sums / divisor[:, None], out.dtype.element_ty, INTERPRETED)
    tl.store(out + row_head[:, None] * RANK + latent_dims[None, :], result, mask=row_exists[:, None])
    if lse_log2 is not None:
        tl.store(lse_log2 + row_head, log2_sum(largest, denominator), mask=row_exists)
