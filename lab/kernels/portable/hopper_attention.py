"""The Gluon kernel of paged attention for SM90, for calls that are bound by matrix products: prefill, extend, long verify.

Glossary:

* piece: some key tiles of one request and one K/V head, and the block of packed query rows (128 or 64) that sees them.
* partition: a group of a program's warps with a task of its own, such as loading tiles.
* ring: a circular buffer of K or V tiles in shared memory. A slot of the ring holds one tile.
* full, empty: the two barriers of a slot. They complete when a tile has arrived in the slot and when it has been read.

A program computes one piece after another. Its partitions go through the same pieces and tiles in the same order (`piece_at`,
`nth_tile`), and only wait for each other's barriers:

    producer (1 warp)              consumer 0 (4 warps, rows 0 to 63)        consumer 1 (rows 64 to 127)

    wait k_empty[slot] <---------- arrive, after Q.K^T of the slot ---------- arrive      (2 arrivals)
    K tile by TMA
    ... bytes ----> k_full[slot] > wait, before Q.K^T ----------------------> wait
    wait v_empty[slot] <---------- arrive, after P.V of the slot ------------ arrive      (2 arrivals)
    V tile by TMA
    ... bytes ----> v_full[slot] > wait, before P.V ------------------------> wait

A consumer computes the softmax of a tile while its product P.V of the tile before runs, and while the products of the other
consumer run. The two consumers do not wait for each other:

    consumer     QK n, PV n-1 | softmax n | QK n+1, PV n | softmax n+1
    its products QK n           PV n-1      QK n+1         PV n

A block of 64 rows has only one consumer. Several programs then run on a multiprocessor, and overlap as two consumers do.

Products take operands of 16 bits. So over an e4m3 cache the producer loads the bytes into separate rings, `loaded`, and two
more partitions convert them to float16: one converts K, the other V.

    producer                       converter of K, or of V (1 warp each)     consumers

    wait loaded empty[slot] <----- arrive, when the tile is converted
    tile by TMA
    ... bytes ----> loaded full > wait; load half a tile, convert, store; twice
                                   wait empty[slot] before <---------------- arrive, after the product of the slot
                                   arrive full[slot] ----------------------> wait

The wait for a partition's n-th tile uses the parity of n // stages, the wait for an empty slot the opposite parity, so that the
first one does not wait.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from lab.kernels.portable.hopper_pieces import (
    BOX_BYTES,
    CONSUMER_ROWS,
    begin_walk,
    box_pages,
    bytes_of,
    consumer_rows,
    copy_boxes,
    hide,
    load_query,
    nth_tile,
    piece_at,
    positive_scale,
    store_piece,
    sums_by_thread,
    wait_for,
    with_weights,
)
from lab.kernels.portable.partial_results import await_launch_before
from lab.kernels.portable.rows import row_bounds
from lab.kernels.portable.softmax import fitted, fitting_power, rounded, row_scale, softmax_step


class Rings(NamedTuple):
    """Buffers for K and V tiles in shared memory, [stages, keys, head_dim], and their full and empty barriers, [stages, 1]."""

    k: Any
    v: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


@gluon.jit
def _rings(DTYPE: gl.constexpr, READERS: gl.constexpr, DIMS: gl.constexpr, TILE: gl.constexpr):
    BYTES: gl.constexpr = bytes_of(DTYPE)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(BOX_BYTES, DIMS * BYTES), 8 * BYTES)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = TILE.stages
    rings = Rings(
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE.keys, DIMS], LAYOUT),
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE.keys, DIMS], LAYOUT),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for slot in gl.static_range(STAGES):
        mbarrier.init(rings.k_full.index(slot), 1)
        mbarrier.init(rings.v_full.index(slot), 1)
        mbarrier.init(rings.k_empty.index(slot), READERS)
        mbarrier.init(rings.v_empty.index(slot), READERS)
    return rings


@gluon.jit
def _produce(
    pools,  # (TMA descriptor of K, of V, block tables of K and V, their row strides)
    walk,  # where the program's work begins; a comment in `hopper_pieces` describes this tuple
    batch,  # the lengths and sizes of the batch, described there too
    rings,  # `Rings` of tiles in the cache's dtype
    PAGE_SIZE: gl.constexpr,
    SHARED: gl.constexpr,  # True: programs divide the keys
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,  # query heads per K/V head
    TILE: gl.constexpr,  # `HopperTile`
):
    k_tiles, v_tiles, block_tables, table_strides = pools
    loaded = 0
    while walk[0] < walk[1]:
        piece, walk = piece_at(walk, batch, SHARED, CAUSAL, GROUP, TILE)
        k_table = block_tables[0] + piece.request.to(gl.int64) * table_strides[0]
        v_table = block_tables[1] + piece.request.to(gl.int64) * table_strides[1]
        for number in range(piece.keys.num_tiles):
            begin = nth_tile(piece.keys, number, TILE)
            slot = loaded % TILE.stages
            parity = loaded // TILE.stages & 1
            barriers = (rings.k_full.index(slot), rings.k_empty.index(slot))
            _load_tile(k_tiles, k_table, piece, begin, rings.k.index(slot), barriers, parity, PAGE_SIZE)
            barriers = (rings.v_full.index(slot), rings.v_empty.index(slot))
            _load_tile(v_tiles, v_table, piece, begin, rings.v.index(slot), barriers, parity, PAGE_SIZE)
            loaded += 1


@gluon.jit
def _load_tile(descriptor, table, piece, begin, slot, barriers, parity, PAGE_SIZE: gl.constexpr):
    """Load a tile of K or V when `slot` is empty. `barriers`: (full, empty). `parity` alternates with each use of `slot`."""
    KEYS: gl.constexpr = slot.shape[0]
    full, empty = barriers
    pages = box_pages(
        table, begin, piece.kv_len, KEYS, PAGE_SIZE
    )  # before the wait, which hides the time of these loads
    mbarrier.wait(empty, parity ^ 1)
    mbarrier.expect(full, KEYS * slot.shape[1] * bytes_of(slot.dtype))
    copy_boxes(descriptor, pages, piece, begin, slot, full, 0, PAGE_SIZE)


@gluon.jit
def _consume(
    queries,  # (pointer to the query, its strides of rows and of heads)
    q_slots,  # shared memory of the query rows, [consumers, CONSUMER_ROWS, head_dim]
    terms,  # (sinks, scales, results, partials)
    walk,  # where the program's work begins; a comment in `hopper_pieces` describes this tuple
    batch,  # the lengths and sizes of the batch, described there too
    rings,  # `Rings` of tiles in the dtype of products
    WHICH: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SHARED: gl.constexpr,  # True: programs divide the keys
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,  # query heads per K/V head
    TILE: gl.constexpr,  # `HopperTile`
):
    """Compute attention over all tiles of the program, for the 64 rows of warp group WHICH, and write the results."""
    KEYS: gl.constexpr = TILE.keys
    q_slot = q_slots.index(WHICH)
    DIMS: gl.constexpr = q_slot.shape[1]
    DTYPE: gl.constexpr = q_slot.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS, 16])
    FITTED: gl.constexpr = queries[0].dtype.element_ty == gl.bfloat16 and gl.float16 == DTYPE
    scale_of_all, is_negative = positive_scale(terms[1])
    window_left = batch[2]
    column = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    multiplied = 0  # tiles of all pieces
    while walk[0] < walk[1]:
        place = walk[0]
        share_places = walk[4]
        piece, walk = piece_at(walk, batch, SHARED, CAUSAL, GROUP, TILE)
        q = load_query(queries, piece, is_negative, DIMS, WHICH, GROUP, TILE)
        if FITTED:
            power = fitting_power(q, DTYPE)
            q = fitted(q, power, DTYPE)
            scale = gl.convert_layout(row_scale(scale_of_all, power), gl.SliceLayout(1, SCORES))
        else:
            scale = scale_of_all
        q_slot.store(q)
        fence_async_shared()  # products read it
        keys = piece.keys
        num_masked = keys.num_tiles - keys.num_common
        token = (piece.q_block * TILE.rows + WHICH * CONSUMER_ROWS + consumer_rows(SCORES)) // GROUP
        bounds = row_bounds(keys.q_position + token, keys, window_left, CAUSAL)
        largest = gl.full([CONSUMER_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        sums = gl.full([CONSUMER_ROWS, DIMS], 0.0, gl.float32, SUMS)
        weights = gl.full([CONSUMER_ROWS, KEYS], 0.0, gl.float32, SCORES)
        denominator = sums_by_thread(weights)
        if keys.num_tiles > 0:
            wait_for(rings.k_full, multiplied, TILE)
            scores = _launch_scores(q_slot, rings, multiplied, SCORES, TILE)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(rings.k_empty.index(multiplied % TILE.stages))
            scores = hide(scores, nth_tile(keys, 0, TILE), column, piece, bounds, PAGE_SIZE)
            weights, rescale, largest = softmax_step(scores, scale, largest, DTYPE)
            denominator = with_weights(denominator, rescale, weights)
            multiplied += 1
            wait_for(rings.k_full, multiplied, TILE, keys.num_tiles > 1)
        for MASKED in gl.static_range(1, -1, -1):  # the loop twice: with a mask, and without one
            for number in range(1 if MASKED else gl.maximum(num_masked, 1), num_masked if MASKED else keys.num_tiles):
                scores = _launch_scores(q_slot, rings, multiplied, SCORES, TILE)
                sums = _launch_sums(weights, sums, rings, multiplied - 1, SUMS, TILE)
                scores = warpgroup_mma_wait(1, [scores])
                mbarrier.arrive(rings.k_empty.index(multiplied % TILE.stages))
                if MASKED:
                    scores = hide(scores, nth_tile(keys, number, TILE), column, piece, bounds, PAGE_SIZE)
                weights, rescale, largest = softmax_step(scores, scale, largest, DTYPE)
                denominator = with_weights(denominator, rescale, weights)
                multiplied += 1
                # The branch of this wait keeps ptxas from moving the softmax after the wait for P.V.
                wait_for(rings.k_full, multiplied, TILE, number + 1 < keys.num_tiles)
                sums = warpgroup_mma_wait(0, [sums])
                mbarrier.arrive(rings.v_empty.index((multiplied - 2) % TILE.stages))
                sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
        if keys.num_tiles > 0:
            sums = _launch_sums(weights, sums, rings, multiplied - 1, SUMS, TILE)
            sums = warpgroup_mma_wait(0, [sums])
            mbarrier.arrive(rings.v_empty.index((multiplied - 1) % TILE.stages))
        state = (
            gl.convert_layout(largest, gl.SliceLayout(1, SUMS)),
            gl.convert_layout(gl.sum(denominator, 1), gl.SliceLayout(1, SUMS)),
            sums,
        )
        heads = (piece.kv_head, batch[4])
        FIRST_ROW: gl.constexpr = WHICH * CONSUMER_ROWS
        store_piece(state, piece, heads, place, share_places, terms, FIRST_ROW, 0, None, SUMS, GROUP, TILE)


@gluon.jit
def _launch_scores(q_slot, rings, number, SCORES: gl.constexpr, TILE: gl.constexpr):
    k = rings.k.index(number % TILE.stages).permute((1, 0))
    nothing = gl.full([CONSUMER_ROWS, TILE.keys], 0.0, gl.float32, SCORES)
    return warpgroup_mma(q_slot, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _launch_sums(weights, sums, rings, number, SUMS: gl.constexpr, TILE: gl.constexpr):
    wait_for(rings.v_full, number, TILE)
    weights = rounded(weights, rings.v.dtype)
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
    return warpgroup_mma(weights, rings.v.index(number % TILE.stages), sums, is_async=True)


@gluon.jit
def convert(
    walk,  # where the program's work begins; a comment in `hopper_pieces` describes this tuple
    batch,  # the lengths and sizes of the batch, described there too
    loaded,
    rings,
    WHICH: gl.constexpr,  # 0: K; 1: V
    SHARED: gl.constexpr,  # True: programs divide the keys
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,  # query heads per K/V head
    TILE: gl.constexpr,  # `HopperTile`
):
    """Convert all K tiles (WHICH 0) or V tiles (WHICH 1) of the program from e4m3 (`loaded`) to float16 (`rings`)."""
    converted = 0
    while walk[0] < walk[1]:
        piece, walk = piece_at(walk, batch, SHARED, CAUSAL, GROUP, TILE)
        for _ in range(piece.keys.num_tiles):
            slot = converted % TILE.stages
            parity = converted // TILE.stages & 1
            if WHICH == 0:
                barriers = (loaded.k_full, loaded.k_empty, rings.k_full, rings.k_empty)
                _convert_tile(loaded.k.index(slot), rings.k.index(slot), barriers, slot, parity)
            else:
                barriers = (loaded.v_full, loaded.v_empty, rings.v_full, rings.v_empty)
                _convert_tile(loaded.v.index(slot), rings.v.index(slot), barriers, slot, parity)
            converted += 1


@gluon.jit
def _convert_tile(loaded, converted, barriers, slot, parity):
    """Write an e4m3 tile in float16 to `converted`. `barriers` is (full, empty) of the e4m3 buffer, then of the float16 buffer.
    A warp loads half a tile before it writes, so that it waits for shared memory only twice per tile.
    """
    DIMS: gl.constexpr = loaded.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIMS, DIMS // 8], [1, 1], [1, 0])
    PART: gl.constexpr = 1024 // DIMS  # keys; each thread converts 32 elements
    PARTS: gl.constexpr = loaded.shape[0] // PART // 2
    loaded_full, loaded_empty, full, empty = barriers
    mbarrier.wait(loaded_full.index(slot), parity)
    mbarrier.wait(empty.index(slot), parity ^ 1)
    for half in gl.static_range(2):
        parts = ()
        for part in gl.static_range(PARTS):
            parts = parts + (loaded.slice((half * PARTS + part) * PART, PART).load(LAYOUT),)  # noqa: RUF005 - Triton has no stars
        for part in gl.static_range(PARTS):
            converted.slice((half * PARTS + part) * PART, PART).store(parts[part].to(converted.dtype))
    fence_async_shared()  # products read it
    mbarrier.arrive(full.index(slot))
    mbarrier.arrive(loaded_empty.index(slot))


# Arguments that differ from call to call: Triton must not compile the kernel again for the value 1 or multiples of 16.
VARYING = ["least_q_len", "max_q_len", "window_left", "batch_size", "num_kv_heads", "num_shares", "least_places"]


@gluon.jit(do_not_specialize=VARYING)
def hopper_attention_kernel(
    query,  # [num_rows, num_qo_heads, HEAD_DIM]
    k_tiles,  # TMA descriptor of K, result of `_boxes`
    v_tiles,  # as k_tiles, but of V
    block_tables,  # (of K, of V)
    seq_lens,
    cu_seqlens_q,  # None: every request has max_q_len rows
    sinks,  # None: no sink
    scales,  # (bmm1_scale, bmm2_scale), each a number or a pointer
    results,  # (out, lse_log2 or None)
    partials,  # `PartialResults`; None: a program reads all keys of its rows
    least_q_len,  # None: the launch is for all requests; else for those of `least_q_len` to `max_q_len` rows
    max_q_len,
    window_left,  # -1: no window
    batch_size,
    num_kv_heads,
    num_shares,  # number of shares, into which the key tiles of the batch are divided; 0 if not SHARED
    least_places,  # smallest size of a share, in key tiles; the start of a request counts as tiles too (`key_shares`)
    query_strides,  # (of rows, of heads)
    table_strides,  # (of K, of V), elements from row to row
    GROUP: gl.constexpr,  # query heads per K/V head
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    SHARED: gl.constexpr,
    TILE: gl.constexpr,  # `HopperTile`
    OVERLAPS: gl.constexpr,  # True: the next launch may begin before this one ends
    OVERLAPPED: gl.constexpr,  # True: this launch may have begun before the previous one ended
):
    """Compute attention of blocks of query rows over a paged cache. A row is one query token and one query head.

    With SHARED, the grid is (q_blocks, num_shares). Shares are consecutive parts of the batch's key tiles. Program (i, j)
    computes block i of each request that has key tiles in share j. Without SHARED, the grid is (programs, 1): each program
    computes several blocks in turn, and reads all keys of each block.
    """
    if OVERLAPS:  # the merge may begin, and waits for the end of this launch
        gdc_launch_dependents()
    STORED: gl.constexpr = k_tiles.dtype
    CONVERTS: gl.constexpr = gl.float8e4nv == STORED
    DTYPE: gl.constexpr = gl.float16 if CONVERTS else STORED
    CONSUMERS: gl.constexpr = TILE.rows // CONSUMER_ROWS
    q_slots = gl.allocate_shared_memory(DTYPE, [CONSUMERS, CONSUMER_ROWS, HEAD_DIM], gl.NVMMASharedLayout(128, 16))
    rings = _rings(DTYPE, CONSUMERS, HEAD_DIM, TILE)
    loaded = _rings(STORED, 1, HEAD_DIM, TILE) if CONVERTS else rings
    batch = (seq_lens, (cu_seqlens_q, least_q_len, max_q_len), window_left, batch_size, num_kv_heads)
    walk = begin_walk(batch, num_shares, least_places, SHARED, GROUP, TILE)
    queries = (query, query_strides)
    pools = (k_tiles, v_tiles, block_tables, table_strides)
    terms = (sinks, scales, results, partials)
    FIRST: gl.constexpr = 2 - CONSUMERS  # partitions from here on
    END: gl.constexpr = 5 if CONVERTS else 3
    gl.warp_specialize(
        [
            (_consume, (queries, q_slots, terms, walk, batch, rings, 1, PAGE_SIZE, SHARED, CAUSAL, GROUP, TILE)),
            (_consume, (queries, q_slots, terms, walk, batch, rings, 0, PAGE_SIZE, SHARED, CAUSAL, GROUP, TILE)),
            (_produce, (pools, walk, batch, loaded, PAGE_SIZE, SHARED, CAUSAL, GROUP, TILE)),
            (convert, (walk, batch, loaded, rings, 0, SHARED, CAUSAL, GROUP, TILE)),
            (convert, (walk, batch, loaded, rings, 1, SHARED, CAUSAL, GROUP, TILE)),
        ][FIRST:END],
        [4, 1, 1, 1][FIRST : END - 1],
        [TILE.consumer_registers, TILE.producer_registers, TILE.producer_registers, TILE.producer_registers][
            FIRST : END - 1
        ],
    )
    if OVERLAPPED:
        await_launch_before()
