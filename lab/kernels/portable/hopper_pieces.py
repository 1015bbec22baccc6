"""Code that both Gluon kernels use: the division of work into pieces, copies of tiles, loads of queries, and masks.

A piece is some key tiles of one request and one K/V head, with the block of query rows that sees them. A partition is a group
of a program's warps with a task of its own. All partitions of a program go through the same pieces and tiles in the order that
this module defines. `lab.kernels.portable.key_shares` explains place.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from lab.kernels.portable.key_shares import BLOCK_REQUESTS, begin_at_tile, next_unit, reach_of, tiles_in_reach
from lab.kernels.portable.partial_results import slot_of, store_share, store_unit_shares
from lab.kernels.portable.rows import block_at, keys_of_block, q_lens_of_kind, request_rows, tile_begin
from lab.kernels.portable.softmax import logit_scale

CONSUMER_ROWS: gl.constexpr = gl.constexpr(64)  # rows of one `wgmma`
BOX_BYTES: gl.constexpr = gl.constexpr(128)  # bytes of each key in a TMA box: the largest swizzle
# The smallest scale of logits. It stands for 0, because 0 times the -inf of a hidden key is NaN.
LEAST_SCALE: gl.constexpr = gl.constexpr(1e-30)
NO_KEY: gl.constexpr = gl.constexpr(2**31 - 1)  # after every key


@gluon.constexpr_function
def bytes_of(dtype):
    return dtype.primitive_bitwidth // 8


class Piece(NamedTuple):
    """A part of a program's work: tiles `first_tile` to `end_tile` - 1 of a request and K/V head, for one block of rows."""

    request: Any
    kv_head: Any
    q_block: Any
    kv_len: Any
    q_start: Any
    q_len: Any
    first_tile: Any
    end_tile: Any
    num_tiles: Any
    keys: Any


# Below, `batch` is (seq_lens, kind, window_left, batch_size, num_kv_heads); `lab.kernels.portable.rows` explains `kind`. `walk`
# is the position of a partition in the program's work. If programs divide the keys (SHARED), it is (place, end, request, the
# request's first place, places of a share), in the words of `lab.kernels.portable.key_shares`. Otherwise a place is a block of
# rows and a K/V head, and `walk` is (place, end, request, its first block, number of requests with blocks from this one on).


@gluon.jit
def begin_walk(batch, num_shares, least_places, SHARED: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr):
    seq_lens, kind, window_left, batch_size, num_kv_heads = batch
    lanes = gl.arange(0, BLOCK_REQUESTS, gl.BlockedLayout([1], [32], [4], [0]))
    if SHARED:
        requests = (seq_lens, batch_size, reach_of(window_left, kind[2]), num_kv_heads, kind, lanes)
        place, end, last, request, request_begin = begin_at_tile(
            gl.program_id(1).to(gl.int64), requests, num_shares, least_places, TILE
        )
    else:
        place = gl.program_id(0)
        request, request_begin, last, blocks = block_at(
            place // num_kv_heads, batch_size, kind, lanes, GROUP, TILE.rows
        )
        end = blocks * num_kv_heads
    return (
        place.to(gl.int32),
        end.to(gl.int32),
        request.to(gl.int32),
        request_begin.to(gl.int32),
        last.to(gl.int32),
    )


@gluon.jit
def piece_at(walk, batch, SHARED: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr):
    """Return (the `Piece` at position `walk` of the program's work, position of the next piece)."""
    seq_lens, kind, window_left, batch_size, num_kv_heads = batch
    place, end, request, request_begin, last = walk
    if not SHARED:
        request, request_begin, last = _pass_requests(
            place // num_kv_heads, request, request_begin, last, batch, GROUP, TILE
        )
    kv_len = gl.load(seq_lens + request).to(gl.int32)
    first_in_reach, num_tiles = tiles_in_reach(kv_len, reach_of(window_left, kind[2]), TILE.keys)
    q_start, q_len = request_rows(kind[0], request.to(gl.int64), kind[2])
    if SHARED:
        START_PLACES: gl.constexpr = TILE.start_keys // TILE.keys
        q_block = gl.program_id(0)
        unit_places = num_tiles + START_PLACES
        kv_head = (place - request_begin) // unit_places
        first_tile = (place - request_begin) % unit_places - START_PLACES
        end_tile = gl.minimum(num_tiles, first_tile + end - place)
        request_end = request_begin + unit_places * num_kv_heads
        after = next_unit(
            place + end_tile - first_tile, request, request_begin, request_end, batch_size, kind, START_PLACES
        )
        walk = (after[0], end, after[1], after[2], last)
    else:
        # A later causal block sees more keys. The blocks of the last request are ordered from the longest to the shortest, so
        # that no long block runs alone at the end. The order alternates from request to request, so that neighbours are
        # similar. The order of programs alternates too: that with the longest block of a turn has the shortest of the next.
        kv_head = place % num_kv_heads
        q_block = place // num_kv_heads - request_begin
        q_block = gl.where(last % 2 == 1, gl.cdiv(q_len * GROUP, TILE.rows) - 1 - q_block, q_block)
        first_tile = num_tiles * 0
        end_tile = num_tiles
        programs = gl.num_programs(0)
        turn = place // programs
        goes_back = turn % 2 == 0  # in the next turn
        in_turn = gl.where(goes_back, programs - 1 - gl.program_id(0), gl.program_id(0))
        walk = ((turn + 1) * programs + in_turn, end, request, request_begin, last)
    keys = keys_of_block(
        first_in_reach, first_tile, end_tile, kv_len, q_len, q_block, window_left, 0, CAUSAL, GROUP, TILE
    )
    return Piece(request, kv_head, q_block, kv_len, q_start, q_len, first_tile, end_tile, num_tiles, keys), walk


@gluon.jit
def _pass_requests(block, request, begin, left, batch, GROUP: gl.constexpr, TILE: gl.constexpr):
    _, kind, _, batch_size, _ = batch
    blocks = gl.cdiv(q_lens_of_kind(request, batch_size, kind) * GROUP, TILE.rows)
    while begin + blocks <= block:
        begin += blocks
        left = left - gl.where(blocks > 0, 1, 0)
        request += 1
        blocks = gl.cdiv(q_lens_of_kind(request, batch_size, kind) * GROUP, TILE.rows)
    return request, begin, left


@gluon.jit
def nth_tile(keys, number, TILE: gl.constexpr):
    """Return the first key of tile number `number` in the `KeyRange` `keys`. Tiles that need a mask come first."""
    num_masked = keys.num_tiles - keys.num_common
    masked = tile_begin(keys, number, True, TILE.keys)
    return gl.where(number < num_masked, masked, tile_begin(keys, number - num_masked, False, TILE.keys))


@gluon.jit
def keys_missing(key, kv_len, BOX_KEYS: gl.constexpr):
    """Return how many of the BOX_KEYS keys that begin at `key` lie after the last of the request's `kv_len` keys."""
    return gl.minimum(gl.maximum(key + BOX_KEYS - kv_len, 0), BOX_KEYS)


@gluon.jit
def tile_keys(begin, column, kv_len, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr):
    """Return the key in each column of a tile of scores that begins at key `begin`; NO_KEY if the column must be masked. If a
    TMA box would reach n keys beyond the request's last key, `copy_boxes` loads the box that begins n keys earlier: its first
    n columns, which repeat earlier keys, are NO_KEY.
    """
    BOX_KEYS: gl.constexpr = min(KEYS, PAGE_SIZE)
    box = begin + column // BOX_KEYS * BOX_KEYS
    key = begin + column - keys_missing(box, kv_len, BOX_KEYS)
    return gl.where(key < box, NO_KEY, key)


@gluon.jit
def box_pages(table, begin, kv_len, KEYS: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Return the page id of each TMA box of the tile from key `begin` on, int32; 0 for boxes after the last key."""
    BOX_KEYS: gl.constexpr = min(KEYS, PAGE_SIZE)
    pages = ()
    for box in gl.static_range(KEYS // BOX_KEYS):
        key = begin + box * BOX_KEYS
        page = gl.load(table + key // PAGE_SIZE, mask=key < kv_len, other=0)
        pages = pages + (page.to(gl.int32),)  # type: ignore[assignment]  # noqa: RUF005
    return pages


@gluon.jit
def copy_boxes(
    descriptor,  # TMA descriptor of the pool
    pages,  # result of `box_pages`
    piece,  # `Piece`
    begin,
    slot,  # shared memory [keys, elements]
    full,  # the barrier that counts the arriving bytes
    FIRST_DIM: gl.constexpr,  # first element of each key that is copied
    PAGE_SIZE: gl.constexpr,
):
    """Copy the tile that begins at key `begin` to `slot` in shared memory, one TMA box after another.

    Keys after the request's last key are not read: a box that would reach n keys beyond the last key begins n keys earlier,
    and TMA writes zeros for keys before the page. A box whose keys are all before every row's window is not read either, as
    its page may belong to another request: the copy begins before the page, so that TMA writes only zeros.
    """
    KEYS: gl.constexpr = slot.shape[0]
    BOX_KEYS: gl.constexpr = min(KEYS, PAGE_SIZE)
    BOXES: gl.constexpr = KEYS // BOX_KEYS
    BOX_DIMS: gl.constexpr = min(slot.shape[1], BOX_BYTES // bytes_of(slot.dtype))
    COLUMNS: gl.constexpr = slot.shape[1] // BOX_DIMS
    # The slot's swizzled columns of BOX_DIMS elements lie one after the other, and so do the pages of a column.
    boxes = slot._reinterpret(slot.dtype, [COLUMNS * BOXES, 1, 1, BOX_KEYS, BOX_DIMS], descriptor.layout)
    for box in gl.static_range(BOXES):
        key = begin + box * BOX_KEYS
        in_page = key % PAGE_SIZE - keys_missing(key, piece.kv_len, BOX_KEYS)
        in_page = gl.where(key + BOX_KEYS <= piece.keys.first_key, -BOX_KEYS, in_page)
        for column in gl.static_range(COLUMNS):
            tma.async_copy_global_to_shared(
                descriptor,
                [pages[box], piece.kv_head, in_page, FIRST_DIM + column * BOX_DIMS],
                full,
                boxes.index(column * BOXES + box),
            )


@gluon.jit
def consumer_rows(LAYOUT: gl.constexpr):
    return gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def load_query(
    queries,  # (pointer to the first element wanted, strides of rows and of heads)
    piece,  # `Piece`, whose block of rows is loaded
    is_negative,
    DIMS: gl.constexpr,
    WHICH: gl.constexpr,
    GROUP: gl.constexpr,  # query heads per K/V head
    TILE: gl.constexpr,  # `HopperTile`
):
    """Load the query rows of consumer warp group WHICH, [CONSUMER_ROWS, DIMS]; negate them if `is_negative`."""
    query, strides = queries
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIMS, DIMS // 8], [4, 1], [1, 0])
    row = piece.q_block * TILE.rows + WHICH * CONSUMER_ROWS + consumer_rows(LOADED)
    token = row // GROUP
    head = piece.kv_head * GROUP + row % GROUP
    rows = query + (piece.q_start + token) * strides[0] + head * strides[1]
    dims = gl.arange(0, DIMS, gl.SliceLayout(0, LOADED))
    q = gl.load(rows[:, None] + dims[None, :], mask=(token < piece.q_len)[:, None], other=0.0)
    if is_negative:
        q = -q
    return q


@gluon.jit
def positive_scale(scales):
    """Return (max(|s|, LEAST_SCALE), s < 0) for the scale s of logits in base 2. If s is NaN, the first value is NaN."""
    scale = logit_scale(scales)
    is_negative = scale < 0
    scale = gl.where(is_negative, -scale, scale)
    return gl.where(scale < LEAST_SCALE, LEAST_SCALE, scale), is_negative  # a NaN stays a NaN


@gluon.jit
def wait_for(full, number, TILE: gl.constexpr, pred=True):
    """If `pred` is True, wait until the program's tile number `number` has arrived in its slot of shared memory."""
    mbarrier.wait(full.index(number % TILE.stages), number // TILE.stages & 1, pred=pred)


@gluon.jit
def hide(scores, begin, column, piece, bounds, PAGE_SIZE: gl.constexpr):
    """Return a tile's scores, with -inf where a row does not see a key. `bounds`: (first key, end of the keys) of each row."""
    key = tile_keys(begin, column, piece.kv_len, PAGE_SIZE, scores.shape[1])
    first, end = bounds
    visible = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def sums_by_thread(weights):
    """Return four sums for each row, float32 [rows, 4]: of the weights in each of the four threads that hold the row. Thread i
    holds weights 2 i and 2 i + 1 of every 8 (PTX ISA, accumulators of `wgmma`), so that no shuffle is needed.
    """
    by_thread = gl.reshape(weights, [weights.shape[0], weights.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(by_thread, 3), 1)


@gluon.jit
def in_rows_of(x, tile):
    return gl.convert_layout(x, gl.SliceLayout(1, tile.type.layout))


@gluon.jit
def with_weights(denominator, rescale, weights):
    """Add a tile's weights to a softmax's denominator, [rows, 4]: one part for each of the four threads that hold a row."""
    return denominator * in_rows_of(rescale, denominator)[:, None] + sums_by_thread(weights)


@gluon.jit
def store_piece(
    state,  # (largest, denominator, sums [CONSUMER_ROWS, elements]) of a softmax
    piece,  # `Piece`
    heads,  # (K/V head, number of K/V heads)
    place,  # position of the piece's first tile in the work of all programs (`key_shares`)
    share_places,  # length of a program's share of these positions
    terms,  # (sinks, scales, results, partials)
    FIRST_ROW: gl.constexpr,  # index in the block of the first row of `state`
    FIRST_DIM: gl.constexpr,  # index in the output row of the first element of `state`
    ROW_DIMS: gl.constexpr,  # elements of an output row; None: as many as in `state`
    SUMS: gl.constexpr,  # register layout of `state`
    GROUP: gl.constexpr,  # query heads per K/V head
    TILE: gl.constexpr,  # `HopperTile`
):
    """Write the result of one consumer warp group for a part of the program's work: output rows if the part has all keys of the
    request and K/V head, else a partial result. Two consumers with different elements of the same rows both write the LSE.
    """
    kv_head, num_kv_heads = heads
    sinks, scales, results, partials = terms
    block_row = FIRST_ROW + consumer_rows(SUMS)
    row = piece.q_block * TILE.rows + block_row
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_head = (piece.q_start + token) * (num_kv_heads * GROUP) + head
    dims = FIRST_DIM + gl.arange(0, state[2].shape[1], gl.SliceLayout(0, SUMS))
    is_whole = (piece.first_tile == 0) & (piece.end_tile == piece.num_tiles)
    slot = slot_of(gl.program_id(1), piece.q_block, gl.num_programs(0), piece.first_tile == 0)
    rows = (row_head, head, token < piece.q_len, slot * TILE.rows + block_row)
    store_share(state, rows, dims, is_whole, sinks, scales[1], results, partials, ROW_DIMS)
    if partials is not None and FIRST_ROW + FIRST_DIM == 0 and piece.first_tile == 0:
        unit = piece.request * num_kv_heads + kv_head
        store_unit_shares(partials.of_units, unit, place, piece.num_tiles, share_places)
