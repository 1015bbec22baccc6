"""FlashInfer's MLA decode call in Triton, for any GPU that Triton compiles for and its CPU interpreter.

After absorption all query heads read the same cache entries, whose latent part is key and value at once: each tile of entries
is loaded once, for the packed rows of a request and all heads. The keys of the batch are divided equally among programs
(`lab.kernels.portable.key_shares`), and a second launch merges their partial results. On SM90, calls with many rows run a Gluon
kernel (`lab.kernels.portable.hopper_mla`).

If a call selects entries for each row, the kernel treats every row as a request, whose keys are the row's columns of
``block_tables``: indices of entries in the pool, or -1. A small launch before it writes how many columns each row uses, so that
the host reads no length. Columns of -1 read no memory, but take the time of a key. In DeepSeek-V4's call the first columns are
indices into a second pool, and a row uses at most as many of these columns as it has keys.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from lab.calls import takes
from lab.calls.dsv4_decode import TwoPools
from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import PagedAttention
from lab.calls.selection import WINDOW_COLUMNS
from lab.gpus import capability_of
from lab.kernels.portable.hopper import hopper_mla_launches, hopper_mla_tile
from lab.kernels.portable.key_shares import BLOCK_REQUESTS, NO_REACH, begin_share, choose_shares, tiles_in_reach
from lab.kernels.portable.merge import with_merge
from lab.kernels.portable.partial_results import (
    Results,
    new_partials,
    overlaps_launches,
    slot_of,
    store_share,
    store_unit_shares,
)
from lab.kernels.portable.rows import block_at, request_rows
from lab.kernels.portable.softmax import (
    accumulate,
    dot,
    dot_dtype,
    empty_denominator,
    fitted,
    fitting_power,
    logit_scale,
    logits_log2,
    row_scale,
    whole_denominator,
)
from lab.kernels.portable.tile_choices import choose_mla_tile
from lab.kernels.portable.tiles import ProgramTile, described_tile, page_ids, pool_offsets, tile_descriptor
from lab.kernels.portable.triton_call import TritonCall, TritonLaunch, new_scratch, prepared
from lab.kernels.support import Kernel
from lab.kernels.support.portable import PORTABLE_MLA
from lab.kernels.support.stored_cache import share_memory

# Smallest number of keys of a program: it reads 147 kB of bf16 entries, and its partial result of 16 rows and 512 float32
# elements, 64 kB, is written and read. Estimated, not measured.
LEAST_KEYS = 128
WINDOW = tl.constexpr(WINDOW_COLUMNS)


@takes(MLADecodeCall)
def prepare_trtllm_batch_decode_with_kv_cache_mla(call: MLADecodeCall) -> TritonCall:
    """Return a prepared call: MLA, after absorption, of each request's last query tokens over its paged cache.

    `lab.calls.MLADecodeCall` documents parameters, shapes, dtypes and errors. Raises NotImplementedError with the reason if the
    kernel does not support the call (`lab.kernels.support.why_not`). On a GPU, lengths and page ids are not read: call
    `PagedAttention.check_values` to check them. Products are in the query's dtype, or over an e4m3 cache in fp16 (bf16 for a
    bf16 query with many rows); sums are in float32. `workspace_buffer` is not used. Output rows after the last request's rows
    are not written. With `cum_seq_lens_q` and without `max_q_len` the host reads the largest number of rows. A run returns out,
    the query's shape with a last dimension of `kv_lora_rank`, bfloat16 unless `out` is given; with `return_lse` (out, lse), lse
    in base 2 unless `return_lse_base` is "basee".
    """
    return prepared_mla(PORTABLE_MLA, call, reads_rows=call.cum_seq_lens_q is not None and call.max_q_len is None)


def prepared_mla(kernel: Kernel, call: Any, reads_rows: bool = False) -> TritonCall:
    """Return a prepared MLA call. `reads_rows`: the host has read `cum_seq_lens_q`, so that the call must not be cached."""
    problem = call.problem()

    def steps(out: torch.Tensor, lse: torch.Tensor | None) -> list[Callable[[], object]]:
        made: list[Callable[[], object]] = []
        if not share_memory(problem.query, call.query):  # `problem.query` is a copy, because no view has its shape
            made.append(partial(problem.query.view(call.query.shape).copy_, call.query))
        made += mla_launches(problem, (out, lse))
        if lse is not None and call.lse_is_base_e:
            made.append(partial(lse.mul_, math.log(2.0)))
        return made

    return prepared(kernel, problem, steps, call.returned, reads_contents=reads_rows)


def choose_dot_dtype(problem: PagedAttention, tile: ProgramTile) -> tl.dtype:
    """Return the dtype of the products' operands: bf16 for a bf16 cache, and for a bf16 query in tiles of 64 rows; else
    float16. Triton keeps a converted query in registers, and the sums of 64 rows leave too few registers
    (results/nvidia-h200/kernels.md, "MLA decode: the plain kernel and the Gluon kernel").
    """
    if problem.query.dtype == torch.bfloat16 and tile.rows == 64:
        return tl.bfloat16
    return dot_dtype(problem.k_cache)


def mla_launches(problem: PagedAttention, results: Results) -> list[TritonLaunch]:
    selected, window = problem.selected, None
    if selected is None:
        return _attention_launches(problem, results)
    columns, up_to_row = new_scratch(problem.query.device, *[((problem.num_rows,), torch.int32)] * 2)
    if isinstance(problem, TwoPools):
        cache = problem.window_cache
        window = (cache, up_to_row, cache.stride(0), cache.stride(2), cache.shape[2])
    counting = TritonLaunch(
        _columns_kernel,
        (problem.num_rows,),
        columns,
        up_to_row,
        problem.seq_lens,
        problem.cu_seqlens_q,
        problem.selected_lens,
        problem.max_q_len,
        problem.batch_size,
        selected.shape[1],
        scratch=(columns, up_to_row),
        num_warps=1,
    )
    rows_as_requests = replace(
        problem,
        seq_lens=columns,
        cu_seqlens_q=None,
        max_q_len=1,
        k_block_tables=selected,
        v_block_tables=selected,
    )
    return [counting, *_attention_launches(rows_as_requests, results, window)]


def _attention_launches(
    problem: PagedAttention, results: Results, window: tuple[Any, ...] | None = None
) -> list[TritonLaunch]:
    """Return the launch of attention and, if programs divide the keys, of a merge. `window` is DeepSeek-V4's second pool."""
    device = problem.query.device
    is_selected = problem.selected is not None
    packed_rows = problem.max_q_len * problem.num_qo_heads
    hopper = hopper_mla_tile(problem)
    if hopper is not None:
        shares = choose_shares(hopper, triton.cdiv(packed_rows, hopper.rows), device, LEAST_KEYS)
        return hopper_mla_launches(problem, results, hopper, shares)
    tile = choose_mla_tile(packed_rows, problem.k_cache.element_size(), capability_of(device))
    if is_selected:  # TMA loads only neighbouring entries
        tile = tile._replace(by_descriptor=False)
    q_blocks = triton.cdiv(packed_rows, tile.rows)
    shares = choose_shares(tile, q_blocks, device, LEAST_KEYS)
    partials = new_partials(shares, q_blocks, tile.rows, problem)
    rank, rope = problem.v_head_dim, problem.head_dim - problem.v_head_dim
    attention = TritonLaunch(
        _mla_kernel,
        (q_blocks, shares.count),
        problem.query,
        problem.k_cache,
        window,
        tile_descriptor(problem.k_cache, tile, rank),
        tile_descriptor(problem.k_cache, tile, rope) if rope else None,
        problem.k_block_tables,
        problem.seq_lens,
        problem.cu_seqlens_q,
        problem.sinks,
        problem.scales,
        results,
        partials,
        problem.max_q_len,
        problem.batch_size,
        shares.count,
        shares.least_places,
        problem.query.stride()[:2],
        (problem.k_cache.stride(0), problem.k_cache.stride(2)),
        problem.k_block_tables.stride(0),
        HEADS=problem.num_qo_heads,
        RANK=rank,
        ROPE=rope,
        PAGE_SIZE=problem.page_size,
        SELECTED=is_selected,
        TILE=tile,
        DOT_DTYPE=choose_dot_dtype(problem, tile),
        OVERLAPS=partials is not None and overlaps_launches(device),
        scratch=partials or (),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return with_merge(attention, partials, problem, q_blocks, results)


@triton.jit(do_not_specialize=["max_q_len", "batch_size", "num_columns"])
def _columns_kernel(
    columns,  # int32 [num_rows]
    up_to_row,  # int32 [num_rows]
    seq_lens,
    cu_seqlens_q,  # None: every request has max_q_len rows
    selected_lens,  # None: a row uses as many columns as there are keys up to its position
    max_q_len,
    batch_size,
    num_columns,  # of the table of selected entries
):
    """Write to `columns` how many columns of the table of selected entries each query row uses (0 for padding rows), and to
    `up_to_row` how many keys are at or before the row's position (undefined for padding rows). The grid is (num_rows,).
    """
    row = tl.program_id(0)
    request = row // max_q_len
    if cu_seqlens_q is not None:
        request = block_at(row, batch_size, (cu_seqlens_q, None, max_q_len), tl.arange(0, BLOCK_REQUESTS), 1, 1)[0]
    used = row * 0
    if request < batch_size:
        q_start, q_len = request_rows(cu_seqlens_q, request, max_q_len)
        used = tl.load(seq_lens + request).to(tl.int32) - q_len + (row - q_start).to(tl.int32) + 1
        tl.store(up_to_row + row, used)
        if selected_lens is not None:
            used = tl.load(selected_lens + row)
    tl.store(columns + row, tl.minimum(tl.maximum(used, 0), num_columns))


# Triton must not compile the kernel again if one of these arguments is 1, a multiple of 16, or an aligned address.
@triton.jit(
    do_not_specialize=["max_q_len", "batch_size", "num_shares", "least_places", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "cu_seqlens_q", "sinks"],
)
def _mla_kernel(
    query,  # [num_rows, HEADS, RANK + ROPE]
    kv_cache,  # pool of entries of RANK + ROPE elements
    window,  # DSV4: (pool of the first columns, keys that each row sees, stride of pages, of tokens, page size); else None
    latent_tiles,  # TMA descriptor of the latent parts of the cache's tiles, or None
    rope_tiles,  # TMA descriptor of their rotary parts, or None
    block_tables,  # page ids of each request; if SELECTED, entries of each row
    seq_lens,
    cu_seqlens_q,  # None: every request has max_q_len rows
    sinks,  # None: no sink
    scales,  # (bmm1_scale, bmm2_scale), each a number or a pointer
    results,  # (out, lse_log2 or None)
    partials,  # `PartialResults`; None: a program reads all keys of its rows
    max_q_len,
    batch_size,
    num_shares,  # number of shares, into which the key tiles of the batch are divided
    least_places,  # smallest size of a share, in key tiles; the start of a request counts as tiles too (`key_shares`)
    query_strides,  # (of rows, of heads)
    cache_strides,  # (of pages, of tokens)
    table_stride,  # elements from a row of `block_tables` to the next
    HEADS: tl.constexpr,  # query heads
    RANK: tl.constexpr,  # elements of the latent part of an entry
    ROPE: tl.constexpr,  # elements of the rotary part of an entry; 0: none
    PAGE_SIZE: tl.constexpr,
    SELECTED: tl.constexpr,  # True: a column of `block_tables` is the index of an entry in the pool, or negative for none
    TILE: tl.constexpr,  # `ProgramTile`
    DOT_DTYPE: tl.constexpr,  # dtype of the operands of products
    OVERLAPS: tl.constexpr,  # True: the merge may begin before this launch ends
):
    """Compute latent attention: program (i, j) computes block i of the query rows of each request with key tiles in share j."""
    if OVERLAPS:  # the merge may begin, and waits for the end of this launch
        gdc_launch_dependents()
    # The programs of one share's blocks read the same entries at the same time: all but the first find them in L2.
    q_block = tl.program_id(0)
    q_blocks = tl.num_programs(0)
    share = tl.program_id(1).to(tl.int64)
    BLOCK_ROWS: tl.constexpr = TILE.rows
    BLOCK_KEYS: tl.constexpr = TILE.keys
    START_PLACES: tl.constexpr = TILE.start_keys // BLOCK_KEYS
    ID_TOKENS: tl.constexpr = 1 if SELECTED else PAGE_SIZE
    place, end, share_places, request, request_begin = begin_share(
        share,
        (seq_lens, batch_size, NO_REACH, 1, (cu_seqlens_q, None, max_q_len), tl.arange(0, BLOCK_REQUESTS)),
        num_shares,
        least_places,
        TILE,
    )
    place = tl.maximum(place, request_begin + START_PLACES)

    block_row = tl.arange(0, BLOCK_ROWS)
    token = (q_block * BLOCK_ROWS + block_row) // HEADS
    head = (q_block * BLOCK_ROWS + block_row) % HEADS
    latent_dims = tl.arange(0, RANK)
    rope_dims = RANK + tl.arange(0, ROPE if ROPE > 0 else 1)
    key_offsets = tl.arange(0, BLOCK_KEYS)
    scale = logit_scale(scales)

    while place < end:
        kv_len = tl.load(seq_lens + request).to(tl.int32)
        num_tiles = tiles_in_reach(kv_len, NO_REACH, BLOCK_KEYS)[1]
        first_tile = place - request_begin - START_PLACES
        end_tile = tl.minimum(num_tiles, first_tile + end - place)
        q_start, q_len = request_rows(cu_seqlens_q, request, max_q_len)
        row_exists = token < q_len
        key_limit = kv_len - q_len + token + 1  # 0 or below for a row without keys
        row_head = (q_start + token) * HEADS + head

        q_row = query + (q_start + token)[:, None] * query_strides[0] + head[:, None] * query_strides[1]
        q_latent = tl.load(q_row + latent_dims[None, :], mask=row_exists[:, None], other=0.0)
        q_rope = q_latent
        if ROPE > 0:
            q_rope = tl.load(q_row + rope_dims[None, :], mask=row_exists[:, None], other=0.0)
        power = tl.maximum(fitting_power(q_latent, DOT_DTYPE), fitting_power(q_rope, DOT_DTYPE))
        q_latent = fitted(q_latent, power, DOT_DTYPE)
        q_rope = fitted(q_rope, power, DOT_DTYPE)
        scale_of_rows = row_scale(scale, power)

        # The keys of this share that some row of the block sees, and the leading tiles in which every row sees every key.
        first_token = (q_block * BLOCK_ROWS) // HEADS
        last_token = tl.minimum((q_block * BLOCK_ROWS + BLOCK_ROWS - 1) // HEADS, q_len - 1)
        key_begin = (first_tile * BLOCK_KEYS).to(tl.int32)
        key_end = tl.minimum((end_tile * BLOCK_KEYS).to(tl.int32), kv_len - q_len + last_token + 1)
        seen_tiles = tl.cdiv(tl.maximum(key_end - key_begin, 0), BLOCK_KEYS)
        common_end = tl.minimum(key_end, kv_len - q_len + first_token + 1)
        num_common = 0 if SELECTED else tl.maximum(common_end - key_begin, 0) // BLOCK_KEYS

        largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        denominator = empty_denominator(BLOCK_ROWS, BLOCK_KEYS, TILE.denominator_per_key)
        sums = tl.zeros([BLOCK_ROWS, RANK], tl.float32)
        table = block_tables + request * table_stride
        for MASKED in tl.static_range(1 if SELECTED else 0, 2):  # the loop twice: without a mask, and with one
            num_before = num_common if MASKED else 0
            # Page ids are read one tile ahead, so that Triton can prefetch the entries. Tiles are counted from 0, because
            # Triton 3.7 loses the alignment of addresses if a loop begins at another number.
            page = page_ids(table, key_begin + num_before * BLOCK_KEYS, key_end, ID_TOKENS, BLOCK_KEYS)
            for tile in range(seen_tiles - num_common if MASKED else num_common):
                begin = key_begin + (num_before + tile) * BLOCK_KEYS
                key = begin + key_offsets
                if latent_tiles is not None and rope_tiles is not None and not MASKED:
                    latent = described_tile(latent_tiles, page, 0, begin, 0, PAGE_SIZE, BLOCK_KEYS, RANK)
                    rope = described_tile(rope_tiles, page, 0, begin, RANK, PAGE_SIZE, BLOCK_KEYS, ROPE)
                else:
                    exists = key < key_end
                    if SELECTED:
                        exists = exists & (page >= 0)
                        if window is not None:
                            exists = exists & ((key >= WINDOW) | (key < tl.load(window[1] + request)))
                        offset = page // PAGE_SIZE * cache_strides[0] + page % PAGE_SIZE * cache_strides[1]
                    else:
                        offset = pool_offsets(page, begin, cache_strides[0], cache_strides[1], PAGE_SIZE, BLOCK_KEYS)
                    loaded = exists[:, None] if MASKED else None
                    other = 0.0 if MASKED else None
                    entry = kv_cache + offset[:, None]
                    if window is not None:
                        of_window = page // window[4] * window[2] + page % window[4] * window[3]
                        entry = tl.where(key[:, None] < WINDOW, window[0] + of_window[:, None], entry)
                    latent = tl.load(entry + latent_dims[None, :], mask=loaded, other=other).to(DOT_DTYPE)
                    if ROPE > 0:
                        rope = tl.load(entry + rope_dims[None, :], mask=loaded, other=other).to(DOT_DTYPE)
                page = page_ids(table, begin + BLOCK_KEYS, key_end, ID_TOKENS, BLOCK_KEYS)
                scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
                if ROPE > 0:
                    scores = dot(q_rope, tl.trans(rope), scores)
                scores = logits_log2(dot(q_latent, tl.trans(latent), scores), scale_of_rows)
                if MASKED:
                    # A row that does not exist has a query of zeros, and its result is not stored.
                    visible = exists[None, :] & (key[None, :] < key_limit[:, None])
                    scores = tl.where(visible, scores, float("-inf"))
                largest, denominator, sums = accumulate(scores, latent, largest, denominator, sums, DOT_DTYPE)

        state = (largest, whole_denominator(denominator), sums)
        is_whole = (first_tile == 0) & (end_tile == num_tiles)
        slot = slot_of(share, q_block, q_blocks, first_tile == 0)
        rows = (row_head, head, row_exists, slot * BLOCK_ROWS + block_row)
        store_share(state, rows, latent_dims, is_whole, sinks, scales[1], results, partials)
        if partials is not None and first_tile == 0:
            store_unit_shares(partials.of_units, request, place, num_tiles, share_places)
        place += end_tile - first_tile
        request_begin = place
        request += 1
        place += START_PLACES  # the next request; if it begins after `end`, another program computes it
