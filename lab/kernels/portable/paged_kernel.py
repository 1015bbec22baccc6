"""The Triton kernel of paged attention: decode, verify, draft extend, extend and prefill.

The glossaries of `lab.kernels.portable.paged` and `lab.kernels.portable.key_shares` explain unit, share and place.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from lab.kernels.portable.key_shares import (
    BLOCK_REQUESTS,
    begin_program,
    next_unit,
    place_in_unit,
    places_before,
    reach_of,
    tiles_in_reach,
)
from lab.kernels.portable.merge import merge_if_last
from lab.kernels.portable.partial_results import (
    await_launch_before,
    slot_of,
    store_share,
    store_unit_shares,
)
from lab.kernels.portable.rows import block_at, keys_of_block, request_rows, tile_begin, visible_keys
from lab.kernels.portable.softmax import (
    dot,
    empty_denominator,
    fitted,
    fitting_power,
    logit_scale,
    logits_log2,
    rounded,
    row_scale,
    softmax_step,
    whole_denominator,
    with_weights,
)
from lab.kernels.portable.tiles import PoolStrides, described_tile, halves_of_pairs, page_ids, pool_offsets


class Strides(NamedTuple):  # in elements
    query_row: int
    query_head: int
    k: PoolStrides
    v: PoolStrides


# Triton must not compile the kernel again if one of these arguments is 1, a multiple of 16, or an aligned address.
VARYING = ["least_q_len", "max_q_len", "window_left", "batch_size", "num_kv_heads", "num_shares", "least_places"]
VARYING += ["k_table_stride", "v_table_stride"]
UNALIGNED = ["k_block_tables", "v_block_tables", "seq_lens", "cu_seqlens_q", "sinks"]


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def _attention_kernel(
    query,  # [num_rows, num_qo_heads, HEAD_DIM]
    pools,  # (K, V); int16 if `paired` has made pairs of e4m3 elements
    k_tiles,  # TMA descriptor of K's tiles, or None
    v_tiles,  # as k_tiles, but of V
    k_block_tables,  # [batch_size, pages of a request]
    v_block_tables,
    seq_lens,
    cu_seqlens_q,  # None: every request has max_q_len rows
    sinks,  # None: no sink
    mask,  # packed draft mask [batch_size, max_q_len, MASK_WORDS], or None
    scales,  # (bmm1_scale, bmm2_scale), each a number or a pointer
    results,  # (out, lse_log2 or None)
    partials,  # `PartialResults`; None: a program reads all keys of its rows
    least_q_len,  # None: the launch is for all requests; else for those of `least_q_len` to `max_q_len` rows
    max_q_len,
    window_left,
    batch_size,
    num_kv_heads,
    num_shares,  # number of shares, into which the key tiles of the batch are divided; 0 if not SHARED
    least_places,  # smallest size of a share, in key tiles; the start of a request counts as tiles too (`key_shares`)
    k_table_stride,  # elements from a row of `k_block_tables` to the next
    v_table_stride,
    strides,  # `Strides`
    GROUP: tl.constexpr,  # query heads per K/V head
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASK_WORDS: tl.constexpr,  # 0: no mask
    CAUSAL: tl.constexpr,
    BY_HEAD: tl.constexpr,  # each K/V head has a table and lengths, and is treated as a request of its own
    SHARED: tl.constexpr,  # True: the program reads consecutive key tiles of the batch. False: all of a request and K/V head
    LANES: tl.constexpr,  # `Shares.lanes`
    MERGED: tl.constexpr,  # result of `merged_at_once` if the last program of a unit merges; None: another launch merges
    TILE: tl.constexpr,  # `ProgramTile`
    DOT_DTYPE: tl.constexpr,  # dtype of the operands of products
    OVERLAPS: tl.constexpr,  # True: the next launch may begin before this one ends
    OVERLAPPED: tl.constexpr,  # True: this launch may have begun before the previous one ended
):
    """Compute attention of one block of query rows over the keys of this program. A row is one query token and one head."""
    if OVERLAPS:  # the next launch, the merge or the launch for other requests, may begin
        gdc_launch_dependents()
    reach = reach_of(window_left, max_q_len)
    share = tl.program_id(1).to(tl.int64)
    BLOCK_ROWS: tl.constexpr = TILE.rows
    BLOCK_KEYS: tl.constexpr = TILE.keys
    START_PLACES: tl.constexpr = TILE.start_keys // BLOCK_KEYS if SHARED else 0
    kind = (cu_seqlens_q, least_q_len, max_q_len)
    num_requests = batch_size * num_kv_heads if BY_HEAD else batch_size
    lanes = tl.arange(0, LANES if LANES > 0 else BLOCK_REQUESTS)
    batch = (seq_lens, num_requests, reach, 1 if BY_HEAD else num_kv_heads, kind, lanes)
    if SHARED:
        # The programs of one share's blocks read the same keys at the same time: all but the first find them in L2.
        q_block = tl.program_id(0)
        begun = begin_program(share, batch, num_shares, least_places, TILE, LANES > 0)
        place, end, share_places, request, request_begin, share, unit_places = begun
    else:
        q_block, place, end, share_places, request, request_begin = _begin_block(batch, share, GROUP, TILE)
        unit_places = request_begin

    block_row = tl.arange(0, BLOCK_ROWS)
    token = (q_block * BLOCK_ROWS + block_row) // GROUP
    group_head = (q_block * BLOCK_ROWS + block_row) % GROUP
    PAIRED: tl.constexpr = pools[1].dtype.element_ty == tl.int16
    ELEMENTS: tl.constexpr = HEAD_DIM // 2 if PAIRED else HEAD_DIM
    key_offsets = tl.arange(0, BLOCK_KEYS)
    scale = logit_scale(scales)
    tiles = (k_tiles, v_tiles)

    while place < end:
        kv_len = tl.load(seq_lens + request).to(tl.int32)
        first_in_reach, num_tiles = tiles_in_reach(kv_len, reach, BLOCK_KEYS)
        before = places_before(num_tiles, unit_places, START_PLACES)
        of_rows, kv_head, in_unit = _unit_at(place, request, request_begin, num_tiles + before, batch_size, BY_HEAD)
        first_tile = in_unit - before
        end_tile = tl.minimum(num_tiles, first_tile + end - place)
        q_start, q_len = request_rows(cu_seqlens_q, of_rows, max_q_len)
        row_exists = token < q_len
        head = kv_head * GROUP + group_head
        row_head = (q_start + token) * (num_kv_heads * GROUP) + head
        q_row = query + (q_start + token)[:, None] * strides.query_row + head[:, None] * strides.query_head
        q = tl.load(q_row + tl.arange(0, HEAD_DIM)[None, :], mask=row_exists[:, None], other=0.0)
        power = fitting_power(q, DOT_DTYPE)
        q = fitted(q, power, DOT_DTYPE)
        scale_of_rows = row_scale(scale, power)
        odd_q = q  # if K has pairs: the odd elements of the query, and `q` the even ones
        if PAIRED:
            q, odd_q = tl.split(tl.reshape(q, [BLOCK_ROWS, ELEMENTS, 2]))
        position = kv_len - q_len + token  # of each row; negative if the request has fewer keys than rows
        keys = keys_of_block(
            first_in_reach, first_tile, end_tile, kv_len, q_len, q_block, window_left, MASK_WORDS, CAUSAL, GROUP, TILE
        )
        largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        denominator = empty_denominator(BLOCK_ROWS, BLOCK_KEYS, TILE.denominator_per_key)
        sums = tl.zeros([BLOCK_ROWS, ELEMENTS], tl.float32)
        odd_sums = sums  # sums of the odd elements of V, like odd_q
        k_table = k_block_tables + request * k_table_stride
        v_table = v_block_tables + request * v_table_stride
        heads = (pools[0] + kv_head * strides.k.head, pools[1] + kv_head * strides.v.head)
        for MASKED in tl.static_range(2):  # the loop twice: without a mask, and with one
            # Page ids are read one tile ahead, so that Triton can prefetch the keys. Tiles are counted from 0, because Triton
            # 3.7 loses the alignment of addresses if a loop begins at another number.
            begin = tile_begin(keys, 0, MASKED, BLOCK_KEYS)
            k_page = page_ids(k_table, begin, keys.end, PAGE_SIZE, BLOCK_KEYS)
            v_page = page_ids(v_table, begin, keys.end, PAGE_SIZE, BLOCK_KEYS)
            turns = keys.num_tiles - keys.num_common if MASKED else keys.num_common
            if turns > 0:  # skips the prefetches before the loop
                for tile in range(turns):
                    begin = tile_begin(keys, tile, MASKED, BLOCK_KEYS)
                    key = begin + key_offsets
                    key_exists = (key >= keys.first_key) & (key < keys.end)
                    ids = (k_page, v_page)
                    k, v = _load_keys(
                        tiles, heads, ids, kv_head, begin, key_exists, strides, ELEMENTS, PAGE_SIZE, BLOCK_KEYS, MASKED
                    )
                    following = tile_begin(keys, tile + 1, MASKED, BLOCK_KEYS)
                    k_page = page_ids(k_table, following, keys.end, PAGE_SIZE, BLOCK_KEYS)
                    v_page = page_ids(v_table, following, keys.end, PAGE_SIZE, BLOCK_KEYS)
                    scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
                    if PAIRED:
                        k, odd_k = halves_of_pairs(k)
                        v, odd_v = halves_of_pairs(v)
                        scores = dot(odd_q, odd_k, scores)
                    scores = logits_log2(dot(q, k.to(DOT_DTYPE), scores), scale_of_rows)
                    if MASKED:
                        mask_row = of_rows * max_q_len + token
                        visible = visible_keys(
                            key, key_exists, position, row_exists, keys, mask, mask_row, window_left, MASK_WORDS, CAUSAL
                        )
                        scores = tl.where(visible, scores, float("-inf"))
                    weights, rescale, largest = softmax_step(scores, 1.0, largest, DOT_DTYPE)
                    denominator = with_weights(denominator, rescale, weights)
                    weights = rounded(weights, DOT_DTYPE)
                    sums = dot(weights, v.to(DOT_DTYPE), sums * rescale[:, None])
                    if PAIRED:
                        odd_sums = dot(weights, odd_v, odd_sums * rescale[:, None])
        if PAIRED:
            sums = tl.reshape(tl.join(sums, odd_sums), [BLOCK_ROWS, HEAD_DIM])
        state = (largest, whole_denominator(denominator), sums)
        rows = (row_head, head, row_exists, block_row)
        unit = (of_rows * num_kv_heads + kv_head, kv_head, num_kv_heads, q_start, q_len)
        cut = (place, first_tile, end_tile, num_tiles, share, share_places, num_shares)
        _store(state, rows, q_block, unit, cut, sinks, scales[1], results, partials, GROUP, MERGED, HEAD_DIM)
        place += end_tile - first_tile
        request_end = request_begin + (num_tiles + before) * (1 if BY_HEAD else num_kv_heads)
        if SHARED:
            place, request, request_begin = next_unit(
                place, request, request_begin, request_end, num_requests, kind, START_PLACES
            )
    if OVERLAPPED:
        await_launch_before()


@triton.jit
def _unit_at(place, request, request_begin, unit_places, batch_size, BY_HEAD: tl.constexpr):
    kv_head, in_unit = place_in_unit(place, request_begin, unit_places)
    if BY_HEAD:
        kv_head = request // batch_size
        request = request % batch_size
    return request, kv_head, in_unit


@triton.jit
def _store(
    state,  # (largest, denominator, sums) of a softmax
    rows,  # (row * num_qo_heads + head of the output, head, True where the row exists, index in the block)
    q_block,  # index of the block among the request's blocks of rows
    unit,  # (index of the request and K/V head, K/V head, number of K/V heads, first row of the request, its number of rows)
    cut,  # (place, first tile read, end of the tiles read, number of tiles, share, places of a share, number of shares)
    sinks,
    bmm2_scale,
    results,  # (out, lse_log2 or None)
    partials,  # `PartialResults`; None: every program reads all keys of its rows
    GROUP: tl.constexpr,  # query heads per K/V head
    MERGED: tl.constexpr,  # as in `_attention_kernel`
    HEAD_DIM: tl.constexpr,
):
    """Write the result of a block of rows over the keys that the program has read: the output if these are all keys of the
    request and K/V head, else a partial result. With MERGED, the program that stores the last partial result merges all.
    Without MERGED, the program that has read the first key writes, for the merge launch, which programs have partial results.
    """
    place, first_tile, end_tile, num_tiles, share, share_places, num_shares = cut
    row_head, head, row_exists, block_row = rows
    BLOCK_ROWS: tl.constexpr = block_row.shape[0]
    is_whole = (first_tile == 0) & (end_tile == num_tiles)
    slot = slot_of(share, q_block, tl.num_programs(0), first_tile == 0)
    rows = (row_head, head, row_exists, slot * BLOCK_ROWS + block_row)
    dims = tl.arange(0, HEAD_DIM)
    store_share(state, rows, dims, is_whole, sinks, bmm2_scale, results, partials)
    if partials is not None:
        if MERGED is None:
            if first_tile == 0:
                store_unit_shares(partials.of_units, unit[0], place, num_tiles, share_places)
        elif not is_whole:
            pieces = (place - first_tile, num_tiles, share, share_places, num_shares)
            merge_if_last(unit, pieces, sinks, bmm2_scale, results, partials, GROUP, HEAD_DIM, BLOCK_ROWS, MERGED)


@triton.jit
def _begin_block(batch, kv_head, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return, for a program that reads all keys of one block of rows, (index of the block in the request, first key tile, end
    of the key tiles, number of key tiles per K/V head, request, 0). The key tiles of a request are numbered from 0, K/V head
    after K/V head. If the program has no block, the end equals the first key tile.
    """
    seq_lens, batch_size, reach, _, kind, lanes = batch
    # A later causal block sees more keys. The longest blocks start first, so that no long block runs alone at the end.
    q_block = tl.num_programs(0) - 1 - tl.program_id(0)
    exists = True
    if kind[1] is None:
        request = tl.program_id(2).to(tl.int64)
    else:
        request, begin, _, blocks = block_at(q_block, batch_size, kind, lanes, GROUP, TILE.rows)
        request = tl.minimum(request, batch_size - 1).to(tl.int64)
        exists = q_block < blocks
        q_block -= begin
    places = tiles_in_reach(tl.load(seq_lens + request), reach, TILE.keys)[1]
    place = kv_head * places
    return q_block, place, place + tl.where(exists, places, 0), places, request, tl.zeros([], tl.int64)


@triton.jit
def _load_keys(
    tiles,  # (TMA descriptor of K, of V) or None
    heads,  # (pointer to the K/V head in the pool of K, of V)
    pages,  # (page ids of K, of V), results of `page_ids`
    kv_head,
    begin,  # the tile's first key
    key_exists,  # bool [BLOCK_KEYS]
    strides,  # `Strides`
    ELEMENTS: tl.constexpr,  # of a K/V head in the pool
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return a tile of K [ELEMENTS, BLOCK_KEYS] and of V [BLOCK_KEYS, ELEMENTS]. If `tiles` contains None, pointers load both,
    else TMA. If MASKED, V is zero where `key_exists` is False, because 0 times NaN is NaN. K is undefined there.
    """
    if tiles[0] is not None and tiles[1] is not None:
        k = described_tile(tiles[0], pages[0], kv_head.to(tl.int32), begin, 0, PAGE_SIZE, BLOCK_KEYS, ELEMENTS)
        v = described_tile(tiles[1], pages[1], kv_head.to(tl.int32), begin, 0, PAGE_SIZE, BLOCK_KEYS, ELEMENTS)
        k = tl.trans(k)
        if MASKED:
            v = tl.where(key_exists[:, None], v, 0.0)
    else:
        elements = tl.arange(0, ELEMENTS)
        k_exists = key_exists[None, :] if MASKED else None
        v_exists = key_exists[:, None] if MASKED else None
        other = 0.0 if MASKED else None
        k_offset = pool_offsets(pages[0], begin, strides.k.page, strides.k.token, PAGE_SIZE, BLOCK_KEYS)
        v_offset = pool_offsets(pages[1], begin, strides.v.page, strides.v.token, PAGE_SIZE, BLOCK_KEYS)
        k = tl.load(heads[0] + k_offset[None, :] + elements[:, None], mask=k_exists, other=other)
        v = tl.load(heads[1] + v_offset[:, None] + elements[None, :], mask=v_exists, other=other)
    return k, v
