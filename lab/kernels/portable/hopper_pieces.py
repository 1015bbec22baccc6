"""The pieces of work of a program of the Gluon kernel, and their tiles: one order, which all of its partitions walk."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lab.kernels.portable.key_shares import (
    BLOCK_REQUESTS,
    begin_share,
    first_tile_from,
    next_unit,
    reach_of,
    tiles_in_reach,
)
from lab.kernels.portable.rows import block_at, keys_of_block, q_lens_of_kind, request_rows, tile_begin

NO_KEY: gl.constexpr = gl.constexpr(2**31 - 1)


class Piece(NamedTuple):
    """Some tiles of keys of one request and K/V head, `first_tile` to `end_tile` of `num_tiles`; `keys` is a `KeyRange`."""

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


# `batch` of what follows is (seq_lens, kind, window_left, batch_size, num_kv_heads), the kind from `lab.kernels.portable.rows`.
# Where keys are shared out, `walk` is (place, end, request, request_begin, places of a share). Else each place is a block of
# rows and a K/V head; `walk` is (place, end, request, its first block, the number of requests with blocks from it on).


@gluon.jit
def begin_walk(batch, num_shares, least_tiles, SHARED: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr):
    """Return the walk of this program: the pieces of its share, or a block of rows of each turn of all programs."""
    seq_lens, kind, window_left, batch_size, num_kv_heads = batch
    lanes = gl.arange(0, BLOCK_REQUESTS, gl.BlockedLayout([1], [32], [4], [0]))
    if SHARED:
        START_PLACES: gl.constexpr = TILE.start_keys // TILE.keys
        reach = reach_of(window_left, kind[2])
        place, end, last, unit_places, request, request_begin = begin_share(
            gl.program_id(1).to(gl.int64),
            (seq_lens, batch_size, reach, num_kv_heads, kind, lanes),
            num_shares,
            least_tiles,
            TILE.keys,
            START_PLACES,
            False,
        )
        begun_len = gl.load(seq_lens + gl.minimum(request, batch_size - 1))
        begun_tiles = tiles_in_reach(begun_len, reach, TILE.keys)[1]
        place = first_tile_from(place, request_begin, begun_tiles, unit_places, START_PLACES)
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
    """Return (the `Piece` at the place of a walk, the walk after it)."""
    seq_lens, kind, window_left, batch_size, num_kv_heads = batch
    place, end, request, request_begin, last = walk
    if not SHARED:
        request, request_begin, last = _pass_requests(
            place // num_kv_heads, request, request_begin, last, batch, GROUP, TILE
        )
    kv_len = gl.load(seq_lens + request).to(gl.int32)
    first_in_reach, num_tiles = tiles_in_reach(kv_len, reach_of(window_left, kind[2]), TILE.keys)
    num_tiles = num_tiles.to(gl.int32)  # which fit, as places do: registers are few
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
        # Causal blocks see the more keys the later they are. The last request ends with its shortest, so that no long one is
        # left alone at the end, and from each request to the next lengths go on where they were: up in one, down in the next.
        # Programs take turns to and fro: whoever had the longest of one turn has the shortest of the next.
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
        first_in_reach.to(gl.int32), first_tile, end_tile, kv_len, q_len, q_block, window_left, 0, CAUSAL, GROUP, TILE
    )
    return Piece(request, kv_head, q_block, kv_len, q_start, q_len, first_tile, end_tile, num_tiles, keys), walk


@gluon.jit
def _pass_requests(block, request, begin, left, batch, GROUP: gl.constexpr, TILE: gl.constexpr):
    """Return (request, its first block, requests with blocks from it on) of a block, which is not before `request`."""
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
    """Return the first key of the `number`-th tile of a piece: those that need a mask come first."""
    num_masked = keys.num_tiles - keys.num_common
    masked = tile_begin(keys, number, True, TILE.keys)
    return gl.where(number < num_masked, masked, tile_begin(keys, number - num_masked, False, TILE.keys))


@gluon.jit
def keys_missing(key, kv_len, BOX_KEYS: gl.constexpr):
    """Return the keys that a request lacks to fill a box from `key` on."""
    return gl.minimum(gl.maximum(key + BOX_KEYS - kv_len, 0), BOX_KEYS)


@gluon.jit
def tile_keys(begin, column, kv_len, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr):
    """Return the key in each column of the scores of a tile; NO_KEY where `_load_tile` has put zeros or another box's key."""
    BOX_KEYS: gl.constexpr = min(KEYS, PAGE_SIZE)
    box = begin + column // BOX_KEYS * BOX_KEYS
    key = begin + column - keys_missing(box, kv_len, BOX_KEYS)
    return gl.where(key < box, NO_KEY, key)
