"""Divide a batch's keys equally among a fixed number of programs.

Glossary:

* unit: one request and one K/V head. Units are in order of the request, then of the head.
* tile: BLOCK_KEYS keys of a request, which begin at a multiple of BLOCK_KEYS.
* kind: the requests that a launch serves, chosen by their numbers of query rows (`lab.kernels.portable.rows`). Requests of
  another kind have no places.
* reach: number of a request's last keys that its rows may see. No row sees an earlier key.
* place: a position in the sequence of the batch's work. Each unit has one place for each tile within the reach. Before them it
  has START_PLACES empty places, which represent the time to begin and end the unit.
* share: the consecutive places of one program. All shares have the same number of places. If query rows fill several blocks,
  each block has a program for every share.
* partial result: the attention of a unit over only the keys in one share.
* slot: scratch memory for one partial result.

Three units of 5, 5 and 2 tiles (T) with START_PLACES = 2, in three shares of 6 places. The first two units are cut, so that
share 1 fills two slots, one for the unit in which it begins and one for the unit in which it ends:

    unit   request 0, head 0    request 0, head 1    request 1, head 0
    place  .  .  T  T  T  T  T  .  .  T  T  T  T  T  .  .  T  T
    share  0  0  0  0  0  0  1  1  1  1  1  1  2  2  2  2  2  2

Lengths are known only on the device, so each program finds its share there. A long request is cut where a share ends, a short
request is usually not cut, and no program waits for another.

A small batch, of at most BLOCK_REQUESTS requests, takes about as long as a program needs to find its share in this way. If its
units are about equally long, and there is at least one program per unit, a faster method is used: each unit is cut into the
same number of equal parts, as if it had the places of the longest unit. The unit of a share then follows from the program's
number.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lab.kernels.portable.rows import q_lens_of_kind
from lab.kernels.portable.tiles import HopperTile, ProgramTile

# Lengths that a program reads at a time to find its share, one per thread of 4 warps: the largest small batch.
BLOCK_REQUESTS: tl.constexpr = tl.constexpr(128)
# The same in a batch of at most this many requests: one per thread of one warp, so that no warp waits for another.
WARP_REQUESTS: tl.constexpr = tl.constexpr(32)
# A unit of a small batch is cut into more parts than this only if each part has at least twice `least_places`.
FEW_PARTS: tl.constexpr = tl.constexpr(4)
# Keys by which a share may exceed the equal division, if units are then not cut, or cut into equal parts. A cut costs time: a
# program that begins another request waits for its first keys, and partial results are written, read and merged.
CUT_KEYS: tl.constexpr = tl.constexpr(256)
# Further such keys for each row of a tile: its float32 partial result has the bytes of two keys and values of 16 bits.
CUT_KEYS_OF_ROW: tl.constexpr = tl.constexpr(2)
# The reach without a window: the largest int32.
NO_REACH: tl.constexpr = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Shares:
    """How the key tiles of a call are divided among programs.

    Attributes:
        count: number of shares (parts of the work). Each block of query rows has one program per share.
        least_places: smallest number of places in a share, which are key tiles or, before each unit's tiles, empty.
        lanes: number of lengths that a program of a small batch reads at once, WARP_REQUESTS or BLOCK_REQUESTS; 0: the batch is
            not small.
        merges_at_once: True if the last program that stores a partial result of a request and K/V head merges them
            (`lab.kernels.portable.merge`); False if a second launch merges.
    """

    count: int
    least_places: int = 1
    lanes: int = 0
    merges_at_once: bool = False


def choose_shares(tile: ProgramTile | HopperTile, q_blocks: int, device: torch.device, least_keys: int = 0) -> Shares:
    """Return `Shares` for a launch with as many programs as the GPU runs at the same time; one program on a CPU.

    Args:
        tile: the launch's tile; `tile.per_multiprocessor` programs run on a multiprocessor at the same time.
        q_blocks: blocks of query rows per request; each block has its own programs.
        least_keys: smallest share, in keys; an empty place counts as a tile of keys.
    """
    if device.type != "cuda":
        return Shares(1)
    programs = tile.per_multiprocessor * num_multiprocessors(device)
    return Shares(max(1, programs // q_blocks), max(1, least_keys // tile.keys))


def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def reach_of(window_left, max_q_len):
    """Return how many of a request's last keys its at most `max_q_len` query tokens may see, int32; NO_REACH without a window
    (window_left -1).
    """
    reach = tl.minimum(tl.cast(window_left, tl.int64) + max_q_len, NO_REACH).to(tl.int32)
    return tl.where(window_left >= 0, reach, NO_REACH)


@triton.jit
def tiles_in_reach(kv_len, reach, BLOCK_KEYS: tl.constexpr):
    """Return the first key tile that some row of a request with `kv_len` keys may see, and the number of tiles from it to the
    last key, int32.

    The number is at least 1, because rows without keys must be written too. `reach` is the result of `reach_of`.
    """
    kv_len = kv_len.to(tl.int32)
    first = tl.maximum(kv_len - reach, 0) // BLOCK_KEYS
    return first, tl.maximum(kv_len - 1, 0) // BLOCK_KEYS + 1 - first


# Below, `batch` is (seq_lens, batch_size, reach, num_kv_heads, kind, lanes). `lab.kernels.portable.rows` explains `kind`.
# `lanes` is arange(BLOCK_REQUESTS), or arange(WARP_REQUESTS) in a batch of at most that many requests. Callers make it, because
# `arange` differs between Gluon and Triton.


@triton.jit
def places_of_units(start, batch, BLOCK_KEYS: tl.constexpr, START_PLACES: tl.constexpr):
    """Return how many places (positions in the sequence of work) a K/V head of each request `start + lanes` has, int32.

    They are START_PLACES and its key tiles; none if the launch does not serve the request. A comment above describes `batch`.
    """
    seq_lens, batch_size, reach, _, kind, lanes = batch
    requests = start + lanes
    kv_lens = tl.load(seq_lens + requests, mask=requests < batch_size, other=0)
    places = tiles_in_reach(kv_lens, reach, BLOCK_KEYS)[1] + START_PLACES
    counted = requests < batch_size if kind[1] is None else q_lens_of_kind(requests, batch_size, kind) > 0
    return tl.where(counted, places, 0)


@triton.jit
def places_per_share(batch, num_shares, least_places, TILE: tl.constexpr):
    """Return the number of places (positions in the sequence of work) of the whole batch, and of one program's share.

    A share has at least `least_places` places. They are key tiles, or empty START_PLACES. A comment above describes `batch`.
    """
    BLOCK_KEYS: tl.constexpr = TILE.keys
    START_PLACES: tl.constexpr = TILE.start_keys // BLOCK_KEYS
    CUT_TILES: tl.constexpr = (CUT_KEYS + CUT_KEYS_OF_ROW * TILE.rows) // BLOCK_KEYS
    _, batch_size, _, num_kv_heads, kind, lanes = batch
    sums = lanes.to(tl.int64) * 0
    longest = sums
    counts = sums
    for start in range(0, batch_size, lanes.shape[0]):
        places = places_of_units(start, batch, BLOCK_KEYS, START_PLACES)
        sums += places
        longest = tl.maximum(longest, places)
        counts += (places > 0).to(tl.int64)
    total = tl.sum(sums, 0) * num_kv_heads
    most = tl.max(longest, 0)
    equal_share = tl.maximum(tl.cdiv(total, num_shares), least_places)
    num_requests = tl.cast(batch_size, tl.int64) if kind[1] is None else tl.maximum(tl.sum(counts, 0), 1)
    num_units = num_requests * num_kv_heads
    # A share of whole units, or of an equal part of one unit, if all units had as many places as the longest.
    parts = tl.maximum(num_shares // num_units, 1)
    even_share = tl.maximum(tl.cdiv(most, parts) * tl.cdiv(num_units, num_shares), least_places)
    return total, tl.where(even_share <= equal_share + CUT_TILES, even_share, equal_share)


@triton.jit
def request_at(place, batch, BLOCK_KEYS: tl.constexpr, START_PLACES: tl.constexpr):
    """Return the request to which a place (position in the sequence of work) belongs, and the first place of this request. A
    comment above describes the tuple `batch`, and the glossary START_PLACES.
    """
    _, batch_size, _, num_kv_heads, _, lanes = batch
    request = place * 0
    begin = request
    end = request
    for start in range(0, batch_size, lanes.shape[0]):
        places = places_of_units(start, batch, BLOCK_KEYS, START_PLACES).to(tl.int64) * num_kv_heads
        is_before = (end + tl.cumsum(places, 0) <= place) & (start + lanes < batch_size)
        request += tl.sum(is_before.to(tl.int64), 0)
        begin += tl.sum(tl.where(is_before, places, 0), 0)
        end += tl.sum(places, 0)
    return request, begin


@triton.jit
def begin_share(share, batch, num_shares, least_places, TILE: tl.constexpr):
    """Return the places (positions in the sequence of work) that the program number `share` computes.

    A share has at least `least_places` places. A comment above describes `batch`. The result is (first place, end, number of
    places in a share, request of the first place, first place of this request).
    """
    total, share_places = places_per_share(batch, num_shares, least_places, TILE)
    place = share * share_places
    end = tl.minimum(place + share_places, total)
    request, request_begin = request_at(place, batch, TILE.keys, TILE.start_keys // TILE.keys)
    return place, end, share_places, request, request_begin


@triton.jit
def begin_at_tile(share, batch, num_shares, least_places, TILE: tl.constexpr):
    """Return the places of a share as `begin_share` does: (first place, end, number of places in a share, request, its first
    place). If a share begins at one of the empty START_PLACES of a unit, its first place is that of the unit's first key tile.
    """
    START_PLACES: tl.constexpr = TILE.start_keys // TILE.keys
    seq_lens, batch_size, reach, _, _, _ = batch
    place, end, share_places, request, request_begin = begin_share(share, batch, num_shares, least_places, TILE)
    kv_len = tl.load(seq_lens + tl.minimum(request, batch_size - 1))
    unit_places = tiles_in_reach(kv_len, reach, TILE.keys)[1] + START_PLACES
    place = tl.maximum(place, place - place_in_unit(place, request_begin, unit_places)[1] + START_PLACES)
    return place, end, share_places, request, request_begin


@triton.jit
def begin_in_small_batch(number, batch, num_shares, least_places, TILE: tl.constexpr):
    """Return the work of program `number` of `num_shares` in a small batch: the five values of `begin_at_tile`, the number of
    the program's share, and the number of places of a unit (0 if units have different numbers). A share has at least
    `least_places` places.

    If the requests are about equally long, each request and K/V head is cut into equal parts, as many as there are programs for
    it. Parts that the longest request does not fill are empty, and are the first. START_PLACES are not counted, because every
    part has the same time to begin and end. The numbers of the request and of the part do not depend on the lengths, so that
    they are computed while the lengths are read. Programs of the last parts, which are never empty in the longest request, have
    the first numbers, because the GPU runs these on different multiprocessors.
    """
    BLOCK_KEYS: tl.constexpr = TILE.keys
    START_PLACES: tl.constexpr = TILE.start_keys // BLOCK_KEYS
    seq_lens, batch_size, reach, num_kv_heads, _, _ = batch
    places = places_of_units(0, batch, BLOCK_KEYS, START_PLACES)
    num_units = batch_size * num_kv_heads
    most_parts = num_shares // num_units
    number = number.to(tl.int32)
    turn = number // num_units
    part = most_parts - 1 - turn  # negative in the programs that are left over
    unit = number - turn * num_units
    of_request = unit // num_kv_heads
    num_tiles = tiles_in_reach(tl.load(seq_lens + of_request), reach, BLOCK_KEYS)[1]
    share = tl.where(part >= 0, unit * most_parts + part, number).to(tl.int64)
    most = tl.max(places, 0) - START_PLACES
    least = tl.minimum(tl.maximum(tl.cdiv(most, FEW_PARTS), least_places), 2 * least_places)
    part_places = tl.maximum(tl.cdiv(most, tl.maximum(most_parts, 1)), least)
    excess = part_places - 1 - CUT_KEYS // BLOCK_KEYS
    # A warp sums int32 by one instruction. The sum overflows at 2 ** 35 keys, and the parts may then be unequal.
    is_equal = excess * tl.cast(num_shares, tl.int64) < tl.sum(places, 0).to(tl.int64) * num_kv_heads
    if is_equal & (most_parts > 0):
        share_places = tl.cast(part_places, tl.int64)
        unit_places = share_places * most_parts
        request = of_request.to(tl.int64)
        request_begin = request * (unit_places * num_kv_heads)
        begin = share * share_places
        end = tl.where(part >= 0, begin + share_places, begin)
        place = tl.maximum(begin, (unit + 1) * unit_places - num_tiles)
    else:
        unit_places = tl.zeros([], tl.int64)
        place, end, share_places, request, request_begin = begin_at_tile(share, batch, num_shares, least_places, TILE)
    return place, end, share_places, request, request_begin, share, unit_places


@triton.jit
def begin_program(number, batch, num_shares, least_places, TILE: tl.constexpr, SMALL: tl.constexpr):
    """Return the work of program `number`; if SMALL, the result of `begin_in_small_batch`.

    Otherwise it is the result of `begin_at_tile` for share `number`, followed by `number` and 0, which says that units (a
    request and a K/V head) may have different numbers of places.
    """
    if SMALL:
        return begin_in_small_batch(number, batch, num_shares, least_places, TILE)
    place, end, share_places, request, request_begin = begin_at_tile(number, batch, num_shares, least_places, TILE)
    return place, end, share_places, request, request_begin, number, tl.zeros([], tl.int64)


@triton.jit
def places_before(num_tiles, unit_places, START_PLACES: tl.constexpr):
    """Return the number of places that a unit (request and K/V head) has before its key tiles.

    `num_tiles` is the number of these tiles, and `unit_places` the number of places of a unit. It is 0 if units have different
    numbers: each then has START_PLACES before its tiles.
    """
    return tl.where(unit_places > 0, unit_places - num_tiles, START_PLACES)


@triton.jit
def place_in_unit(place, request_begin, unit_places):
    """Return the K/V head to which a place belongs, and the place's index among the places of this head. `request_begin` is the
    first place of the request, `unit_places` the number of places of each of its heads.

    A division of 32 bits, which takes fewer instructions than a division of 64 bits, is enough for 2**31 keys of 31 K/V heads
    in tiles of 16 keys.
    """
    in_request = (place - request_begin).to(tl.uint32)
    places = unit_places.to(tl.uint32)
    return (in_request // places).to(tl.int64), (in_request % places).to(tl.int64)


@triton.jit
def next_unit(place, request, request_begin, request_end, batch_size, kind, START_PLACES: tl.constexpr):
    """Return where the next unit (request and K/V head) begins: (place of its first key tile, request, first place of the
    request).

    The current unit belongs to `request`, whose places are `request_begin` to `request_end` - 1, and ends at `place`. Requests
    that the launch does not serve (`kind`) are skipped. The next unit may lie after the end of the program's share; another
    program then computes it.
    """
    if place == request_end:
        request_begin = place
        request += 1
        if kind[1] is not None:
            while (request < batch_size) & (q_lens_of_kind(request, batch_size, kind) == 0):
                request += 1
    return place + START_PLACES, request, request_begin
