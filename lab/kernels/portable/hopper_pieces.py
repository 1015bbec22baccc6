"""The pieces of work of a program of the Gluon kernel, and their tiles: one order, which all of its partitions walk."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lab.kernels.portable.key_shares import BLOCK_REQUESTS, begin_share, next_unit, reach_of, tiles_in_reach
from lab.kernels.portable.rows import keys_of_block, request_rows, tile_begin

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


# `batch` of what follows is (seq_lens, cu_seqlens_q, max_q_len, window_left, batch_size, num_kv_heads); `walk` is (place, end,
# request, request_begin, places of a share), of which places alone count where no keys are shared out.


@gluon.jit
def begin_walk(batch, num_shares, least_tiles, SHARED: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr):
    """Return the walk of this program: the pieces of its share, or a block of rows of each turn of all programs."""
    seq_lens, _, max_q_len, window_left, batch_size, num_kv_heads = batch
    if SHARED:
        START_PLACES: gl.constexpr = TILE.start_keys // TILE.keys
        reach = reach_of(window_left, max_q_len)
        lanes = gl.arange(0, BLOCK_REQUESTS, gl.BlockedLayout([1], [32], [4], [0]))
        place, end, share_places, request, request_begin = begin_share(
            gl.program_id(1).to(gl.int64),
            (seq_lens, batch_size, reach, num_kv_heads, lanes),
            num_shares,
            least_tiles,
            TILE.keys,
            START_PLACES,
        )
        begun_len = gl.load(seq_lens + gl.minimum(request, batch_size - 1))
        unit_places = tiles_in_reach(begun_len, reach, TILE.keys)[1] + START_PLACES
        place = gl.maximum(place, place - (place - request_begin) % unit_places + START_PLACES)
    else:
        place = gl.program_id(0)
        end = gl.cdiv(max_q_len * GROUP, TILE.rows) * num_kv_heads * batch_size
        request = place * 0
        request_begin = request
        share_places = request
    return (
        place.to(gl.int32),
        end.to(gl.int32),
        request.to(gl.int32),
        request_begin.to(gl.int32),
        share_places.to(gl.int32),
    )


@gluon.jit
def piece_at(walk, batch, SHARED: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr):
    """Return (the `Piece` at the place of a walk, the walk after it)."""
    seq_lens, cu_seqlens_q, max_q_len, window_left, batch_size, num_kv_heads = batch
    place, end, request, request_begin, share_places = walk
    reach = reach_of(window_left, max_q_len)
    if SHARED:
        START_PLACES: gl.constexpr = TILE.start_keys // TILE.keys
        q_block = gl.program_id(0)
        kv_len = gl.load(seq_lens + request).to(gl.int32)
        first_in_reach, num_tiles = _tiles_in_reach(kv_len, reach, TILE)
        unit_places = num_tiles + START_PLACES
        kv_head = (place - request_begin) // unit_places
        first_tile = (place - request_begin) % unit_places - START_PLACES
        end_tile = gl.minimum(num_tiles, first_tile + end - place)
        request_end = request_begin + unit_places * num_kv_heads
        after = next_unit(place + end_tile - first_tile, request, request_begin, request_end, START_PLACES)
        walk = (after[0], end, after[1], after[2], share_places)
        of_request = request
    else:
        # Causal blocks see the more keys the later they are: the longest first, so that none is left alone at the end. And
        # programs take turns to and fro: whoever had the longest of one turn has the shortest of the next.
        units = batch_size * num_kv_heads
        q_block = gl.cdiv(max_q_len * GROUP, TILE.rows) - 1 - place // units
        of_request = place % units // num_kv_heads
        kv_head = place % num_kv_heads
        kv_len = gl.load(seq_lens + of_request).to(gl.int32)
        first_in_reach, num_tiles = _tiles_in_reach(kv_len, reach, TILE)
        first_tile = num_tiles * 0
        end_tile = num_tiles
        programs = gl.num_programs(0)
        turn = place // programs
        goes_back = turn % 2 == 0  # in the next turn
        in_turn = gl.where(goes_back, programs - 1 - gl.program_id(0), gl.program_id(0))
        walk = ((turn + 1) * programs + in_turn, end, request, request_begin, share_places)
    q_start, q_len = request_rows(cu_seqlens_q, of_request.to(gl.int64), max_q_len)
    keys = keys_of_block(
        first_in_reach, first_tile, end_tile, kv_len, q_len, q_block, window_left, 0, CAUSAL, GROUP, TILE
    )
    return Piece(of_request, kv_head, q_block, kv_len, q_start, q_len, first_tile, end_tile, num_tiles, keys), walk


@gluon.jit
def _tiles_in_reach(kv_len, reach, TILE: gl.constexpr):
    """Return `tiles_in_reach` in int32, which places and tiles fit here: registers are few."""
    first, number = tiles_in_reach(kv_len, reach, TILE.keys)
    return first.to(gl.int32), number.to(gl.int32)


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
