"""The Gluon kernel of latent attention (MLA decode) for SM90, for calls with many rows, which are bound by matrix products.

A program has 64 packed rows. Their float32 sums of 512 elements need the registers of two warp groups, the consumers, each of
which computes half of the output columns. A tile of entries is loaded once for both products: K is the whole tile, V its latent
columns, a left and a right half. Consumer 0 computes the softmax weights, and sends them to consumer 1 through shared memory
(`message`). Barriers, pieces and parities are as in `lab.kernels.portable.hopper_attention`:

    producer (1 warp)              consumer 0 (4 warps, left columns)         consumer 1 (right columns)

    wait left.empty[slot] <------- arrive, after P.V left of the slot
    left and rope columns by TMA
    ... bytes ---> left.full[slot] > wait, before Q.K^T left and rope
    wait right.empty[slot] <------------------------------------------------- arrive, after P.V right of the slot
    right columns by TMA
    ... bytes --> right.full[slot] > wait, before Q.K^T right --------------> wait, before P.V right
                                   wait message.empty <---------------------- arrive, after P.V right
                                   weights, factors to shared memory
                                   arrive message.full ---------------------> wait message.full

A message has the weights of a tile and the factors of earlier sums; the last message of a piece has the softmax's state
instead. Consumer 0 launches Q.K^T of tile n + 1 after P.V of tile n, so that the slot of tile n is empty early, and two slots
hide the time of a load:

    consumer 0   PV left n, QK n+1  | softmax n+1, message | PV left n+1, QK n+2
    consumer 1   PV right n         | wait                 | PV right n+1

Consumer 0 sends a tile's weights after it has read all columns of the tile for Q.K^T. So the arrival of consumer 1 means that
both have read the right columns.
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
    CONSUMER_ROWS,
    begin_walk,
    box_pages,
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
from lab.kernels.portable.rows import row_bounds
from lab.kernels.portable.softmax import rounded, softmax_step

SCORE_PRODUCTS: gl.constexpr = gl.constexpr(3)  # the matrix products of a tile's Q.K^T: left, rope, right columns


class Columns(NamedTuple):
    """Shared memory for queries or cache entries: the left and right half of the latent columns, and the rotary columns."""

    left: Any
    right: Any
    rope: Any


class Ring(NamedTuple):
    """Shared memory for tiles of cache entries, and its barriers. The left half of the latent columns and the rotary columns
    are loaded together and have common barriers. The right half of the latent columns has its own.
    """

    tiles: Any
    left_full: Any
    left_empty: Any
    right_full: Any
    right_empty: Any


class Message(NamedTuple):
    """Shared memory in which consumer 0 sends a tile's weights, [rows, keys], and factors for the earlier sums, [2, rows]."""

    weights: Any
    factors: Any
    full: Any
    empty: Any


@gluon.jit
def _produce(pool, walk, batch, ring, PAGE_SIZE: gl.constexpr, HEADS: gl.constexpr, TILE: gl.constexpr):
    boxes, block_table, table_stride = pool
    tiles = ring.tiles
    HALF: gl.constexpr = tiles.left.shape[2]
    ROPE: gl.constexpr = tiles.rope.shape[2]
    loaded = 0
    while walk[0] < walk[1]:
        piece, walk = piece_at(walk, batch, True, True, HEADS, TILE)
        table = block_table + piece.request.to(gl.int64) * table_stride
        for number in range(piece.keys.num_tiles):
            begin = nth_tile(piece.keys, number, TILE)
            slot = loaded % TILE.stages
            parity = loaded // TILE.stages & 1
            pages = box_pages(
                table, begin, piece.kv_len, TILE.keys, PAGE_SIZE
            )  # before the wait, which hides these loads
            full = ring.left_full.index(slot)
            mbarrier.wait(ring.left_empty.index(slot), parity ^ 1)
            mbarrier.expect(full, TILE.keys * (HALF + ROPE) * 2)
            copy_boxes(boxes, pages, piece, begin, tiles.left.index(slot), full, 0, PAGE_SIZE)
            copy_boxes(boxes, pages, piece, begin, tiles.rope.index(slot), full, 2 * HALF, PAGE_SIZE)
            full = ring.right_full.index(slot)
            mbarrier.wait(ring.right_empty.index(slot), parity ^ 1)
            mbarrier.expect(full, TILE.keys * HALF * 2)
            copy_boxes(boxes, pages, piece, begin, tiles.right.index(slot), full, HALF, PAGE_SIZE)
            loaded += 1


@gluon.jit
def _consume_left(
    query,  # (pointer, strides of rows and of heads)
    q_slots,  # `Columns` for the query rows
    terms,  # (sinks, scales, results, partials)
    walk,  # where the program's work begins; a comment in `hopper_pieces` describes this tuple
    batch,  # the lengths and sizes of the batch, described there too
    ring,  # `Ring`
    message,  # `Message`
    PAGE_SIZE: gl.constexpr,
    HEADS: gl.constexpr,  # query heads
    TILE: gl.constexpr,  # `HopperTile`
):
    """Compute the softmax weights of all tiles, send them to `_consume_right`, and compute the left half of each output row."""
    HALF: gl.constexpr = q_slots.left.shape[1]
    DTYPE: gl.constexpr = q_slots.left.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.keys, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    scale, is_negative = positive_scale(terms[1])
    column = gl.arange(0, TILE.keys, gl.SliceLayout(0, SCORES))
    multiplied = 0  # tiles of all pieces
    sent = 0
    while walk[0] < walk[1]:
        place = walk[0]
        share_places = walk[4]
        piece, walk = piece_at(walk, batch, True, True, HEADS, TILE)
        _write_query(query, piece, is_negative, q_slots, HEADS, TILE)
        keys = piece.keys
        num_masked = keys.num_tiles - keys.num_common
        token = (piece.q_block * TILE.rows + consumer_rows(SCORES)) // HEADS
        bounds = row_bounds(keys.q_position + token, keys, -1, True)
        largest = gl.full([CONSUMER_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        sums = gl.full([CONSUMER_ROWS, HALF], 0.0, gl.float32, SUMS)
        weights = gl.full([CONSUMER_ROWS, TILE.keys], 0.0, DTYPE, SCORES)
        denominator = sums_by_thread(gl.full([CONSUMER_ROWS, TILE.keys], 0.0, gl.float32, SCORES))
        if keys.num_tiles > 0:
            scores = warpgroup_mma_wait(0, [_launch_scores(q_slots, ring, multiplied, SCORES, TILE)])
            scores = hide(scores, nth_tile(keys, 0, TILE), column, piece, bounds, PAGE_SIZE)
            weights, rescale, largest = softmax_step(scores, scale, largest, DTYPE)
            denominator = with_weights(denominator, rescale, weights)
            weights = rounded(weights, DTYPE)
            _send_weights(message, sent, weights, rescale)
            multiplied += 1
            sent += 1
        for MASKED in gl.static_range(1, -1, -1):  # the loop twice: with a mask, and without one
            for number in range(1 if MASKED else gl.maximum(num_masked, 1), num_masked if MASKED else keys.num_tiles):
                sums = _launch_sums(weights, sums, ring, multiplied - 1, SUMS, TILE)
                scores = _launch_scores(q_slots, ring, multiplied, SCORES, TILE)
                sums = warpgroup_mma_wait(SCORE_PRODUCTS, [sums])
                mbarrier.arrive(ring.left_empty.index((multiplied - 1) % TILE.stages))
                scores = warpgroup_mma_wait(0, [scores])
                if MASKED:
                    scores = hide(scores, nth_tile(keys, number, TILE), column, piece, bounds, PAGE_SIZE)
                weights, rescale, largest = softmax_step(scores, scale, largest, DTYPE)
                denominator = with_weights(denominator, rescale, weights)
                sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
                weights = rounded(weights, DTYPE)
                _send_weights(message, sent, weights, rescale)
                multiplied += 1
                sent += 1
        if keys.num_tiles > 0:
            sums = warpgroup_mma_wait(0, [_launch_sums(weights, sums, ring, multiplied - 1, SUMS, TILE)])
            mbarrier.arrive(ring.left_empty.index((multiplied - 1) % TILE.stages))
        denominator = gl.convert_layout(gl.sum(denominator, 1), gl.SliceLayout(1, SCORES))
        mbarrier.wait(message.empty, sent & 1 ^ 1)
        message.factors.index(0).store(largest)
        message.factors.index(1).store(denominator)
        mbarrier.arrive(message.full)
        sent += 1
        largest = gl.convert_layout(largest, gl.SliceLayout(1, SUMS))
        denominator = gl.convert_layout(denominator, gl.SliceLayout(1, SUMS))
        state = (largest, denominator, sums)
        store_piece(state, piece, (0, 1), place, share_places, terms, 0, 0, 2 * HALF, SUMS, HEADS, TILE)


@gluon.jit
def _write_query(query, piece, is_negative, q_slots, HEADS: gl.constexpr, TILE: gl.constexpr):
    HALF: gl.constexpr = q_slots.left.shape[1]
    ROPE: gl.constexpr = q_slots.rope.shape[1]
    left = load_query(query, piece, is_negative, HALF, 0, HEADS, TILE)
    right = load_query((query[0] + HALF, query[1]), piece, is_negative, HALF, 0, HEADS, TILE)
    rope = load_query((query[0] + 2 * HALF, query[1]), piece, is_negative, ROPE, 0, HEADS, TILE)
    q_slots.left.store(left)
    q_slots.right.store(right)
    q_slots.rope.store(rope)
    fence_async_shared()  # products read them


@gluon.jit
def _launch_scores(q_slots, ring, number, SCORES: gl.constexpr, TILE: gl.constexpr):
    slot = number % TILE.stages
    scores = gl.full([CONSUMER_ROWS, TILE.keys], 0.0, gl.float32, SCORES)
    wait_for(ring.left_full, number, TILE)
    left = ring.tiles.left.index(slot).permute((1, 0))
    scores = warpgroup_mma(q_slots.left, left, scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(q_slots.rope, ring.tiles.rope.index(slot).permute((1, 0)), scores, is_async=True)
    wait_for(ring.right_full, number, TILE)
    return warpgroup_mma(q_slots.right, ring.tiles.right.index(slot).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _launch_sums(weights, sums, ring, number, SUMS: gl.constexpr, TILE: gl.constexpr):
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
    return warpgroup_mma(weights, ring.tiles.left.index(number % TILE.stages), sums, is_async=True)


@gluon.jit
def _send_weights(message, sent, weights, rescale):
    """Send a tile's softmax weights and factors for the earlier sums, when consumer 1 has read the previous message."""
    mbarrier.wait(message.empty, sent & 1 ^ 1)
    message.weights.store(weights)
    message.factors.index(0).store(rescale)
    fence_async_shared()  # products read the weights
    mbarrier.arrive(message.full)


@gluon.jit
def _consume_right(terms, walk, batch, ring, message, HEADS: gl.constexpr, TILE: gl.constexpr):
    """Compute the right half of each output row with the softmax weights that `_consume_left` sends."""
    HALF: gl.constexpr = ring.tiles.right.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    multiplied = 0
    received = 0
    while walk[0] < walk[1]:
        place = walk[0]
        share_places = walk[4]
        piece, walk = piece_at(walk, batch, True, True, HEADS, TILE)
        sums = gl.full([CONSUMER_ROWS, HALF], 0.0, gl.float32, SUMS)
        for _ in range(piece.keys.num_tiles):
            mbarrier.wait(message.full, received & 1)
            sums = sums * message.factors.index(0).load(ROWS)[:, None]
            wait_for(ring.right_full, multiplied, TILE)
            right = ring.tiles.right.index(multiplied % TILE.stages)
            sums = warpgroup_mma_wait(0, [warpgroup_mma(message.weights, right, sums, is_async=True)])
            mbarrier.arrive(message.empty)
            mbarrier.arrive(ring.right_empty.index(multiplied % TILE.stages))
            multiplied += 1
            received += 1
        mbarrier.wait(message.full, received & 1)
        largest = message.factors.index(0).load(ROWS)
        denominator = message.factors.index(1).load(ROWS)
        mbarrier.arrive(message.empty)
        received += 1
        state = (largest, denominator, sums)
        store_piece(state, piece, (0, 1), place, share_places, terms, 0, HALF, 2 * HALF, SUMS, HEADS, TILE)


# Arguments that differ from call to call: Triton must not compile the kernel again for the value 1 or multiples of 16.
@gluon.jit(do_not_specialize=["max_q_len", "batch_size", "num_shares", "least_places", "table_stride"])
def hopper_mla_kernel(
    query,  # [num_rows, HEADS, RANK + ROPE]
    boxes,  # TMA descriptor of the pool, result of `_boxes`
    block_table,
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
    table_stride,  # elements from a row of `block_table` to the next
    HEADS: gl.constexpr,  # query heads
    RANK: gl.constexpr,  # elements of the latent part of an entry
    ROPE: gl.constexpr,  # elements of the rotary part of an entry
    PAGE_SIZE: gl.constexpr,
    TILE: gl.constexpr,  # `HopperTile`
    OVERLAPS: gl.constexpr,  # True: the merge may begin before this launch ends
):
    """Compute latent attention: program (i, j) computes block i of the query rows of each request with key tiles in share j."""
    if OVERLAPS:  # the merge may begin, and waits for the end of this launch
        gdc_launch_dependents()
    DTYPE: gl.constexpr = boxes.dtype
    STAGES: gl.constexpr = TILE.stages
    HALF: gl.constexpr = RANK // 2
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_slots = Columns(
        gl.allocate_shared_memory(DTYPE, [CONSUMER_ROWS, HALF], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [CONSUMER_ROWS, HALF], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [CONSUMER_ROWS, ROPE], SWIZZLED),
    )
    tiles = Columns(
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE.keys, HALF], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE.keys, HALF], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [STAGES, TILE.keys, ROPE], SWIZZLED),
    )
    ring = Ring(
        tiles,
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    message = Message(
        gl.allocate_shared_memory(DTYPE, [CONSUMER_ROWS, TILE.keys], SWIZZLED),
        gl.allocate_shared_memory(gl.float32, [2, CONSUMER_ROWS], PLAIN),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    for slot in gl.static_range(STAGES):
        mbarrier.init(ring.left_full.index(slot), 1)
        mbarrier.init(ring.left_empty.index(slot), 1)
        mbarrier.init(ring.right_full.index(slot), 1)
        mbarrier.init(ring.right_empty.index(slot), 1)
    mbarrier.init(message.full, 1)
    mbarrier.init(message.empty, 1)
    batch = (seq_lens, (cu_seqlens_q, None, max_q_len), -1, batch_size, 1)
    walk = begin_walk(batch, num_shares, least_places, True, HEADS, TILE)
    terms = (sinks, scales, results, partials)
    pool = (boxes, block_table, table_stride)
    query = (query, query_strides)
    gl.warp_specialize(
        [
            (_consume_left, (query, q_slots, terms, walk, batch, ring, message, PAGE_SIZE, HEADS, TILE)),
            (_consume_right, (terms, walk, batch, ring, message, HEADS, TILE)),
            (_produce, (pool, walk, batch, ring, PAGE_SIZE, HEADS, TILE)),
        ],
        [4, 1],
        [TILE.consumer_registers, TILE.producer_registers],
    )
