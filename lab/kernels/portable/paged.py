"""FlashInfer's TRT-LLM attention functions in Triton: any NVIDIA GPU that Triton compiles for, and a CPU in its interpreter.

One kernel serves decode, verify, draft extend and extend; latent attention (MLA) has its own, in `portable_mla`, and so has
MLA's prefill before absorption, in `portable_ragged`. The query rows of a request and the query heads that share a K/V head
are packed into one tile, so K/V is read once for all of them. The keys of the batch are shared out evenly among programs,
whose partial results a second kernel merges (`lab.kernels.portable.key_shares`); only where query rows alone fill the GPU, in a
prefill, has each block of them a program. Lengths stay on the device: nothing is read back, and no length is compiled in.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from lab.calls import ContextCall, DecodeCall, takes
from lab.calls.arguments import following_scale
from lab.calls.problem import PagedAttention, check_values
from lab.gpus import Capability, capability_of, family_that_runs
from lab.kernels.portable.arithmetic import (
    LOG2_E,
    Tile,
    dot,
    dot_dtype,
    empty_denominator,
    fitted,
    fitting_power,
    halves_of_pairs,
    has_rows,
    loads_by_descriptor,
    offsets_of,
    pages_of,
    paired,
    scalar,
    softmax_step,
    tiles_of_pages,
    whole_denominator,
)
from lab.kernels.portable.key_shares import (
    PartialResults,
    Shares,
    choose_shares,
    places_per_share,
    reach_of,
    request_at,
    slot_of,
    store_pieces,
    store_share,
    tiles_of,
)
from lab.kernels.portable.triton_call import Launch, TritonCall
from lab.kernels.support import refuse_unsupported, triton_interprets
from lab.kernels.support.portable import PORTABLE

# A prefix so many times as long as the query rows is long: then a block of rows sees about as many keys as any other.
LONG_PREFIX = 4


@takes(DecodeCall)
def trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> Any:
    """Attention of the last query tokens of each request over its paged K/V: decode, verify, draft extend.

    Parameters, shapes, dtypes and errors are `lab.calls.DecodeCall`'s; what this kernel does not take raises
    NotImplementedError with the reason of `lab.kernels.support.why_not`. On a GPU, lengths and page ids are not read:
    `lab.calls.check_values` checks them on request. Accumulates in float32; `workspace_buffer` is not used.

    Returns:
        out [num_rows, num_qo_heads, head_dim]; with `return_lse`, (out, lse), lse in base 2.
    """
    return _prepare_decode(call)()


@takes(DecodeCall)
def prepare_trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> TritonCall:
    """The same call, ready to be made any number of times. It raises what its checks raise, and launches no attention."""
    return _prepare_decode(call)


@takes(ContextCall)
def trtllm_batch_context_with_kv_cache(call: ContextCall) -> Any:
    """Attention of each request's newest query tokens, as many as it has, over its paged K/V: extend and prefill.

    Parameters, shapes, dtypes and errors are `lab.calls.ContextCall`'s; the rest is as in
    `trtllm_batch_decode_with_kv_cache`.
    """
    return _prepare(call.problem())()


@takes(ContextCall)
def prepare_trtllm_batch_context_with_kv_cache(call: ContextCall) -> TritonCall:
    """The same call, ready to be made any number of times. It raises what its checks raise, and launches no attention."""
    return _prepare(call.problem())


def choose_tile(num_packed_rows: int, head_dim: int, kv_bytes: int, capability: Capability | None) -> Tile:
    """The tile for requests of at most `num_packed_rows` = max_q_len * group rows.

    16 rows are the least a matrix unit takes. Up to 64 rows the call is bound by reading K/V: a tile as small as the rows
    allow, two programs of a multiprocessor that hide each other's waits, and enough tiles of K and V on their way for each.
    Beyond, it is bound by what a tile takes from its arrival to its products: 128 rows as two warp groups, whose tiles come
    by descriptor, which leaves their threads the registers that addresses would take. Measured on an H200, bf16, 64 requests
    at 4,096 keys, 32/4 heads of 128, pages of 64, µs (133, 137, 137 and 174 with what is chosen, or a neighbour of it; times
    of one line are of one GPU, those of two may be of two):

    * 1 token: 150 with three programs, 173 with three and 2 stages; the others were slower with an earlier schedule.
    * 4 tokens: 165 with 32 keys, 4 stages; 160 with 2 stages; 139 by descriptor.
    * 8 tokens: 148 with 64 keys, 3 stages; 154 with 2; 142 with 32 keys, 3 stages; 136 to 138 by descriptor.
    * 16 tokens: 186 to 198 without descriptors; 222 with 32 keys, 4 stages; 238 with blocks of 64 rows; 257 with 2 stages.
    * heads of 64, 1 token: 72; 74 with 128 keys. 4 tokens: 79 and 85. 8 tokens: 78; 83 with 128 keys, 3 stages. Heads of 256,
      8 tokens: 308; 317 with 32 keys, 3 stages.
    * e4m3, at 8,192 keys, 1 token, before `denominator_per_key` and with 3 stages: 141; 140 with 4, 154 with 128 keys, 182
      with 2 stages of those, 203 with three programs. 4 tokens: 183; 185, 185, 216 and 260. 8 tokens: 295; 365 with 32 keys.
    * e4m3 heads of 64, at 4,096 keys, 1 token: 52; 56 with 128 keys. 4 tokens: 95 and 105.

    `denominator_per_key`, with it and without: 4 tokens 135 and 133, where registers lack, of heads of 64 79 and 85, of 256 262
    and 267; 1 token within 1 %; 16 tokens, whose warps share no rows, 188 and 179; e4m3 at 8,192 keys 134 and 140 for 1 token,
    178 and 182 for 4, at 4,096 of heads of 256 149 and 163, 208 and 226.

    `unit_keys`, on 64 requests of 64 to 25,773 keys, 0 / 128 / 256 / 512: 1 token 143 / 133 / 128 / 131, 8 tokens 177 / 161 /
    150 / 153, 16 tokens 274 / 254 / 239 / 206.

    GPUs with less shared memory than SM90's and SM100's 227 KiB, 99 on SM89 and SM120, get smaller tiles; no time measured.

    Args:
        num_packed_rows: most rows of one request.
        head_dim: of K and V.
        kv_bytes: of an element of K and V.
        capability: (major, minor) of the GPU; the interpreter, None, runs SM90's.
    """
    roomy = family_that_runs(capability).has_large_shared_memory
    rows = min(max(16, triton.next_power_of_2(num_packed_rows)), 128 if roomy else 64)
    if not roomy:
        return Tile(rows, max(16, 32 * 128 // max(head_dim, 128)), num_warps=4, num_stages=2, per_multiprocessor=2)
    if rows == 128:
        keys, num_stages = (64, 3) if head_dim <= 128 else (32, 2)
        return Tile(rows, keys, num_warps=8, num_stages=num_stages, unit_keys=512, by_descriptor=True)
    if rows == 64:
        return Tile(rows, 64 * 128 // (max(head_dim, 64) * kv_bytes), num_warps=4, num_stages=4, per_multiprocessor=2)
    return Tile(
        rows,
        64 * 128 // max(head_dim, 128),
        num_warps=4,
        num_stages=3 if kv_bytes > 1 else 4,
        per_multiprocessor=2,
        denominator_per_key=(rows, head_dim, kv_bytes) != (32, 128, 2),
    )


def _prepare_decode(call: DecodeCall) -> TritonCall:
    problem = call.problem()
    if call.bmm1_scale_log2 is None:
        return _prepare(problem)
    # The problem's scale was made of the tensor's contents, which may change from call to call.
    scale, refresh = following_scale(call.bmm1_scale_log2)
    return _prepare(replace(problem, bmm1_scale=scale), refresh)


def _prepare(problem: PagedAttention, *refreshes: Callable[[], object]) -> TritonCall:
    out, lse_log2 = problem.results()
    steps = list(refreshes)
    if has_rows(problem):
        refuse_unsupported(PORTABLE, problem)
        steps += _launches(problem, out, lse_log2)
    check = partial(check_values, problem)
    return TritonCall(problem.query.device, check, steps, problem.returned(out, lse_log2))


def shares_of(problem: PagedAttention, tile: Tile, q_blocks: int) -> Shares | None:
    """How the keys are shared out; None where each block of rows and K/V head has a program for all keys that it sees.

    Shares take every block of a request to see as many keys, which holds where a prefix is long beside the rows.
    """
    shares = choose_shares(tile, q_blocks, problem.query.device)
    blocks = q_blocks * problem.num_kv_heads * problem.batch_size
    if problem.max_kv_len < LONG_PREFIX * problem.max_q_len and blocks >= q_blocks * shares.pieces:
        return None
    return shares


def prefill_tile(problem: PagedAttention, tile: Tile) -> Tile:
    """The tile where each block of rows has a program of its own, in place of `tile`, which is made for shares.

    The blocks of a request then run beside each other and read keys that L2 holds, so that smaller blocks read no more from
    memory, and their last tiles hide fewer keys from fewer rows. Whether two programs of 64 rows run on a multiprocessor, whose
    shared memory they would fill to the byte, and compute beside each other's waits was not looked at.
    Only where tiles come by descriptor. Measured on an H200, bf16, prefill of 4,096 tokens, 32/4 heads, µs, 128 rows against
    64: heads of 128 423 and 377 (402 with 2 stages), of 64 299 and 267, of 256 824 and 753; 8 prompts of 1,024 279 and 257;
    pages of 16, which have no descriptor, 493 and 567.
    """
    narrow = replace(tile, rows=64, num_warps=4, per_multiprocessor=2)
    described = all(loads_by_descriptor(cache, tile.keys) for cache in (problem.k_cache, problem.v_cache))
    return narrow if tile.rows == 128 and described else tile


def _launches(problem: PagedAttention, out: torch.Tensor, lse_log2: torch.Tensor | None) -> list[Launch]:
    group = problem.num_qo_heads // problem.num_kv_heads
    packed_rows = problem.max_q_len * group
    kv_bytes = problem.k_cache.element_size()
    tile = choose_tile(packed_rows, problem.head_dim, kv_bytes, capability_of(problem.query.device))
    shares = shares_of(problem, tile, triton.cdiv(packed_rows, tile.rows))
    if shares is None:
        tile = prefill_tile(problem, tile)
    q_blocks = triton.cdiv(packed_rows, tile.rows)
    parts = None
    if shares is not None and shares.pieces > 1:
        parts = PartialResults.empty(shares, q_blocks, tile.rows, problem)
    k_cache, v_cache = paired((problem.k_cache, problem.v_cache), tile)
    whole_grid = (q_blocks, problem.num_kv_heads, problem.batch_size)
    attention = Launch(
        _attention_kernel,
        whole_grid if shares is None else (q_blocks, shares.pieces),
        problem.query,
        k_cache,
        v_cache,
        tiles_of_pages(problem.k_cache, tile, problem.head_dim),
        tiles_of_pages(problem.v_cache, tile, problem.head_dim),
        problem.k_block_tables,
        problem.v_block_tables,
        problem.seq_lens,
        problem.cu_seqlens_q,
        problem.sinks,
        problem.mask,
        problem.bmm1_scale,
        problem.bmm2_scale,
        out,
        lse_log2,
        None if parts is None else parts.out,
        None if parts is None else parts.lse_log2,
        None if parts is None else parts.pieces,
        problem.max_q_len,
        problem.window_left,
        problem.batch_size,
        problem.num_kv_heads,
        0 if shares is None else shares.pieces,
        0 if shares is None else shares.least_tiles,
        *problem.query.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        problem.k_block_tables.stride(0),
        problem.v_block_tables.stride(0),
        GROUP=group,
        HEAD_DIM=problem.head_dim,
        PAGE_SIZE=problem.page_size,
        MASK_WORDS=0 if problem.mask is None else problem.mask.shape[2],
        CAUSAL=problem.causal,
        SHARED=shares is not None,
        UNIT_PLACES=0 if shares is None else tile.unit_keys // tile.keys,
        BLOCK_ROWS=tile.rows,
        BLOCK_KEYS=tile.keys,
        DENOMINATOR_PER_KEY=tile.denominator_per_key,
        DOT_DTYPE=dot_dtype(problem.k_cache),
        BMM1_IS_TENSOR=isinstance(problem.bmm1_scale, torch.Tensor),
        BMM2_IS_TENSOR=isinstance(problem.bmm2_scale, torch.Tensor),
        OVERLAPS=parts is not None and parts.overlaps,
        INTERPRETED=triton_interprets(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if parts is None or shares is None:
        return [attention]
    return [attention, parts.merge(problem, shares, out, lse_log2)]


# What varies from call to call must not compile again, not even for its value 1 or its multiples of 16.
@triton.jit(do_not_specialize=["max_q_len", "window_left", "batch_size", "num_kv_heads", "pieces", "least_tiles"])
def _attention_kernel(
    query,
    k_cache,  # as v_cache int16 where `paired` has made pairs of e4m3 elements
    v_cache,
    k_tiles,  # a descriptor of k_cache's tiles of keys, or None
    v_tiles,
    k_block_tables,
    v_block_tables,
    seq_lens,
    cu_seqlens_q,  # None: every request has max_q_len rows
    sinks,  # None: no sink
    mask,
    bmm1_scale,
    bmm2_scale,
    out,
    lse_log2,  # None: not wanted
    partial_out,  # float32 [slots, BLOCK_ROWS, HEAD_DIM]; None: nothing is cut
    partial_lse_log2,  # float32 [slots, BLOCK_ROWS]
    unit_pieces,  # int32 [batch_size * num_kv_heads, 2]
    max_q_len,
    window_left,
    batch_size,
    num_kv_heads,
    pieces,
    least_tiles,
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
    SHARED: tl.constexpr,
    UNIT_PLACES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DENOMINATOR_PER_KEY: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BMM1_IS_TENSOR: tl.constexpr,
    BMM2_IS_TENSOR: tl.constexpr,
    OVERLAPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One block of packed rows: over one share of the batch's keys, or over all keys of one request and K/V head."""
    if OVERLAPS:  # the merge may be launched meanwhile, and waits for the end of this
        gdc_launch_dependents()
    # The blocks of one share read the same keys at the same time: all but the first find them in L2.
    q_block = tl.program_id(0)
    reach = reach_of(window_left, max_q_len)
    piece = tl.program_id(1).to(tl.int64)
    if SHARED:
        total, share = places_per_share(
            seq_lens, batch_size, reach, num_kv_heads, pieces, least_tiles, BLOCK_KEYS, UNIT_PLACES
        )
        position = piece * share
        end = tl.minimum(position + share, total)
        request, request_begin = request_at(
            position, seq_lens, batch_size, reach, num_kv_heads, BLOCK_KEYS, UNIT_PLACES
        )
        request_places = (
            tiles_of(tl.load(seq_lens + tl.minimum(request, batch_size - 1)), reach, BLOCK_KEYS)[1] + UNIT_PLACES
        )
        position = tl.maximum(position, position - (position - request_begin) % request_places + UNIT_PLACES)
    else:  # as if the order had this request and head alone, and no empty places
        request = tl.program_id(2).to(tl.int64)
        request_places = tiles_of(tl.load(seq_lens + request), reach, BLOCK_KEYS)[1]
        request_begin = tl.zeros([], tl.int64)
        position = piece * request_places
        end = position + request_places

    block_row = tl.arange(0, BLOCK_ROWS)
    token = (q_block * BLOCK_ROWS + block_row) // GROUP  # of this request: packed row r is token r // GROUP,
    group_head = (q_block * BLOCK_ROWS + block_row) % GROUP  # head r % GROUP of a K/V head's group
    dims = tl.arange(0, HEAD_DIM)
    PAIRED: tl.constexpr = v_cache.dtype.element_ty == tl.int16
    ELEMENTS: tl.constexpr = HEAD_DIM // 2 if PAIRED else HEAD_DIM
    elements = tl.arange(0, ELEMENTS)
    key_offsets = tl.arange(0, BLOCK_KEYS)
    scale_log2 = scalar(bmm1_scale, BMM1_IS_TENSOR) * LOG2_E

    while position < end:
        kv_len = tl.load(seq_lens + request).to(tl.int32)
        start_tile, tiles = tiles_of(kv_len, reach, BLOCK_KEYS)
        kv_head = (position - request_begin) // (tiles + UNIT_PLACES)
        first_tile = (position - request_begin) % (tiles + UNIT_PLACES) - UNIT_PLACES
        last_tile = tl.minimum(tiles, first_tile + end - position)
        if cu_seqlens_q is None:
            q_start = request * max_q_len
            q_len = max_q_len
        else:
            q_start = tl.load(cu_seqlens_q + request).to(tl.int64)
            q_len = (tl.load(cu_seqlens_q + request + 1) - q_start).to(tl.int32)
        row_exists = token < q_len
        head = kv_head * GROUP + group_head
        row_head = (q_start + token) * (num_kv_heads * GROUP) + head
        q = tl.load(
            query + (q_start + token)[:, None] * query_row_stride + head[:, None] * query_head_stride + dims[None, :],
            mask=row_exists[:, None],
            other=0.0,
        )
        power = fitting_power(q, DOT_DTYPE)
        q = fitted(q, power, DOT_DTYPE)
        row_scale_log2 = scale_log2 * tl.exp2(power)
        odd_q = q  # the odd elements where K has pairs, which `q` then lacks
        if PAIRED:
            q, odd_q = tl.split(tl.reshape(q, [BLOCK_ROWS, ELEMENTS, 2]))

        # The keys of this share that any row of the block may see, and among them those that every row sees.
        q_position = kv_len - q_len  # of the request's first query token; negative where it has fewer keys than rows
        position_of_row = q_position + token
        first_token = (q_block * BLOCK_ROWS) // GROUP
        last_token = tl.minimum((q_block * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, q_len - 1)
        first_key = 0
        key_end = kv_len
        common_end = kv_len
        if MASK_WORDS > 0:
            common_end = q_position
        elif CAUSAL:
            key_end = tl.minimum(kv_len, tl.maximum(q_position + last_token + 1, 0))
            common_end = q_position + first_token + 1
        common_begin = 0
        if window_left >= 0:
            first_key = tl.maximum(q_position + first_token - window_left, 0)
            common_begin = tl.maximum(q_position + last_token - window_left, 0)
        share_begin = ((start_tile + first_tile) * BLOCK_KEYS).to(tl.int32)
        share_begin = tl.maximum(share_begin, first_key // BLOCK_KEYS * BLOCK_KEYS)
        share_end = tl.minimum(((start_tile + last_tile) * BLOCK_KEYS).to(tl.int32), key_end)
        if q_block * BLOCK_ROWS >= q_len * GROUP:  # no row of this request
            share_end = share_begin
        num_tiles = tl.cdiv(tl.maximum(share_end - share_begin, 0), BLOCK_KEYS)
        num_before = tl.cdiv(tl.maximum(common_begin - share_begin, 0), BLOCK_KEYS)
        num_common = (tl.minimum(share_end, common_end) - share_begin) // BLOCK_KEYS - num_before
        num_common = tl.maximum(num_common, 0)

        largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        denominator = empty_denominator(BLOCK_ROWS, BLOCK_KEYS, DENOMINATOR_PER_KEY)
        sums = tl.zeros([BLOCK_ROWS, ELEMENTS], tl.float32)
        odd_sums = sums  # as odd_q
        k_table = k_block_tables + request * k_table_stride
        v_table = v_block_tables + request * v_table_stride
        k_head = k_cache + kv_head * k_head_stride
        v_head = v_cache + kv_head * v_head_stride
        for MASKED in tl.static_range(2):  # the loop twice: without a mask, and with one
            # Page ids are read one tile ahead: keys that waited for their ids could not be read ahead themselves. And tiles are
            # counted from 0: Triton 3.7 loses the alignment of addresses behind a counter that begins elsewhere.
            begin = share_begin + _tile_of(0, num_before, num_common, MASKED) * BLOCK_KEYS
            k_page = pages_of(k_table, begin, share_end, PAGE_SIZE, BLOCK_KEYS)
            v_page = pages_of(v_table, begin, share_end, PAGE_SIZE, BLOCK_KEYS)
            for tile in range(num_tiles - num_common if MASKED else num_common):
                begin = share_begin + _tile_of(tile, num_before, num_common, MASKED) * BLOCK_KEYS
                key = begin + key_offsets
                key_exists = (key >= first_key) & (key < share_end)
                k_exists = key_exists[None, :] if MASKED else None
                v_exists = key_exists[:, None] if MASKED else None
                other = 0.0 if MASKED else None
                if k_tiles is not None and v_tiles is not None and not MASKED:
                    slot = begin % PAGE_SIZE
                    k = k_tiles.load([k_page.to(tl.int32), kv_head.to(tl.int32), slot, 0])
                    v = v_tiles.load([v_page.to(tl.int32), kv_head.to(tl.int32), slot, 0])
                    k = tl.trans(tl.reshape(k, [BLOCK_KEYS, HEAD_DIM]))
                    v = tl.reshape(v, [BLOCK_KEYS, HEAD_DIM])
                else:
                    k_offset = offsets_of(k_page, begin, k_page_stride, k_token_stride, PAGE_SIZE, BLOCK_KEYS)
                    v_offset = offsets_of(v_page, begin, v_page_stride, v_token_stride, PAGE_SIZE, BLOCK_KEYS)
                    k = tl.load(k_head + k_offset[None, :] + elements[:, None], mask=k_exists, other=other)
                    v = tl.load(v_head + v_offset[:, None] + elements[None, :], mask=v_exists, other=other)
                following = share_begin + _tile_of(tile + 1, num_before, num_common, MASKED) * BLOCK_KEYS
                k_page = pages_of(k_table, following, share_end, PAGE_SIZE, BLOCK_KEYS)
                v_page = pages_of(v_table, following, share_end, PAGE_SIZE, BLOCK_KEYS)
                scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
                if PAIRED:
                    k, odd_k = halves_of_pairs(k, INTERPRETED)
                    v, odd_v = halves_of_pairs(v, INTERPRETED)
                    scores = dot(odd_q, odd_k, scores, INTERPRETED)
                scores = dot(q, k.to(DOT_DTYPE), scores, INTERPRETED) * row_scale_log2[:, None]
                if MASKED:
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
                        visible = visible & (key[None, :] <= position_of_row[:, None])
                    if window_left >= 0:
                        visible = visible & (key[None, :] >= position_of_row[:, None] - window_left)
                    scores = tl.where(visible, scores, float("-inf"))
                weights, rescale, largest, denominator = softmax_step(
                    scores, largest, denominator, DOT_DTYPE, INTERPRETED
                )
                sums = dot(weights, v.to(DOT_DTYPE), sums * rescale[:, None], INTERPRETED)
                if PAIRED:
                    odd_sums = dot(weights, odd_v, odd_sums * rescale[:, None], INTERPRETED)

        if PAIRED:
            sums = tl.reshape(tl.join(sums, odd_sums), [BLOCK_ROWS, HEAD_DIM])
        store_share(
            largest,
            whole_denominator(denominator),
            sums,
            (first_tile == 0) & (last_tile == tiles),
            sinks,
            head,
            bmm2_scale,
            out,
            lse_log2,
            row_head,
            row_exists,
            partial_out,
            partial_lse_log2,
            slot_of(piece, q_block, tl.num_programs(0), first_tile == 0),
            BLOCK_ROWS,
            HEAD_DIM,
            BMM2_IS_TENSOR,
            INTERPRETED,
        )

        if unit_pieces is not None and first_tile == 0:
            store_pieces(unit_pieces, request * num_kv_heads + kv_head, position, tiles, share)
        position += last_tile - first_tile
        if position == request_begin + (tiles + UNIT_PLACES) * num_kv_heads:
            request_begin = position
            request += 1
        position += UNIT_PLACES  # of the next; where that begins behind `end`, it is another program's


@triton.jit
def _tile_of(number, num_before, num_common, MASKED: tl.constexpr):
    """Which tile of a share is the `number`-th of those that every row sees, or of the others, before and behind them."""
    first = tl.where(number < num_before, 0, num_common) if MASKED else num_before
    return number + first
