"""Divide a batch's keys equally among a fixed number of programs.

Glossary:

* unit: one request and one K/V head. Units are in order of the request, then of the head.
* tile: BLOCK_KEYS keys of a request, which begin at a multiple of BLOCK_KEYS.
* kind: the requests that a launch serves, chosen by their numbers of query rows (`lab.kernels.portable.rows`). Requests of
  another kind have no places.
* reach: number of a request's last keys that its rows may see.
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

Lengths are known only on the device, so each program finds its share there. That takes about as long as the attention of a
small batch (of at most BLOCK_REQUESTS requests). If the units of such a batch are about equally long, and there is at least one
program per unit, each unit is cut into the same number of equal parts, as if it had the places of the longest unit: the unit of
a share then follows from the program's number.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lab.kernels.portable.rows import q_lens_of_kind
from lab.kernels.portable.tiles import HopperTile, ProgramTile

# Lengths that a program reads at a time to find its share, one per thread of 4 warps: the largest small batch.
BLOCK_REQUESTS: tl.constexpr = tl.constexpr(128)
WARP_REQUESTS: tl.constexpr = tl.constexpr(32)  # the same in a smaller batch: one per thread of one warp
# A unit of a small batch is cut into more parts than this only if each part has at least twice `least_places`.
FEW_PARTS: tl.constexpr = tl.constexpr(4)
# Keys by which a share may exceed the equal division, if units are then not cut, or cut into equal parts. A cut costs time: a
# program that begins another request waits for its first keys, and partial results are written, read and merged.
CUT_KEYS: tl.constexpr = tl.constexpr(256)
# Further such keys for each row of a tile: its float32 partial result has the bytes of two keys and values of 16 bits.
CUT_KEYS_OF_ROW: tl.constexpr = tl.constexpr(2)
NO_REACH: tl.constexpr = tl.constexpr(2**31 - 1)  # the reach without a window: the largest int32


@dataclass(frozen=True)
class Shares:
    """How the key tiles of a call are divided among programs."""

    count: int  # number of shares; each block of query rows has one program per share
    least_places: int = 1  # smallest number of places in a share, each a key tile or empty
    lanes: int = 0  # lengths read at once by a program of a small batch (WARP_REQUESTS, BLOCK_REQUESTS), else 0
    merges_at_once: bool = False  # True: the last program of a unit merges its partial results; False: a second launch


def choose_shares(tile: ProgramTile | HopperTile, q_blocks: int, device: torch.device, least_keys: int = 0) -> Shares:
    """Divide keys into shares, each with `q_blocks` programs and at least `least_keys` keys, to fill the GPU; one on a CPU."""
    if device.type != "cuda":
        return Shares(1)
    programs = tile.per_multiprocessor * num_multiprocessors(device)
    return Shares(max(1, programs // q_blocks), max(1, least_keys // tile.keys))


def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def reach_of(window_left, max_q_len):
    """Return how many of a request's last keys its query rows may see, int32; NO_REACH without a window (window_left -1)."""
    reach = tl.minimum(tl.cast(window_left, tl.int64) + max_q_len, NO_REACH).to(tl.int32)
    return tl.where(window_left >= 0, reach, NO_REACH)


@triton.jit
def tiles_in_reach(kv_len, reach, BLOCK_KEYS: tl.constexpr):
    """Return (index of the first key tile within a request's last `reach` keys, number of tiles from there on, at least 1)."""
    kv_len = kv_len.to(tl.int32)
    first = tl.maximum(kv_len - reach, 0) // BLOCK_KEYS
    return first, tl.maximum(kv_len - 1, 0) // BLOCK_KEYS + 1 - first


# Below, `batch` is (seq_lens, batch_size, reach, num_kv_heads, kind, lanes). `lab.kernels.portable.rows` explains `kind`.
# `lanes` is arange(BLOCK_REQUESTS), or arange(WARP_REQUESTS) in a batch of at most that many requests. Callers make it, because
# `arange` differs between Gluon and Triton.


@triton.jit
def places_of_units(start, batch, BLOCK_KEYS: tl.constexpr, START_PLACES: tl.constexpr):
    seq_lens, batch_size, reach, _, kind, lanes = batch
    requests = start + lanes
    kv_lens = tl.load(seq_lens + requests, mask=requests < batch_size, other=0)
    places = tiles_in_reach(kv_lens, reach, BLOCK_KEYS)[1] + START_PLACES
    counted = requests < batch_size if kind[1] is None else q_lens_of_kind(requests, batch_size, kind) > 0
    return tl.where(counted, places, 0)


@triton.jit
def places_per_share(batch, num_shares, least_places, TILE: tl.constexpr):
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
    """Return (first place, end, places per share, request of the first place, first place of this request) of share number
    `share`, a sequence of places. A place is a key tile, or stands for the time to begin a request and K/V head.
    """
    total, share_places = places_per_share(batch, num_shares, least_places, TILE)
    place = share * share_places
    end = tl.minimum(place + share_places, total)
    request, request_begin = request_at(place, batch, TILE.keys, TILE.start_keys // TILE.keys)
    return place, end, share_places, request, request_begin


@triton.jit
def begin_at_tile(share, batch, num_shares, least_places, TILE: tl.constexpr):
    START_PLACES: tl.constexpr = TILE.start_keys // TILE.keys
    seq_lens, batch_size, reach, _, _, _ = batch
    place, end, share_places, request, request_begin = begin_share(share, batch, num_shares, least_places, TILE)
    kv_len = tl.load(seq_lens + tl.minimum(request, batch_size - 1))
    unit_places = tiles_in_reach(kv_len, reach, TILE.keys)[1] + START_PLACES
    place = tl.maximum(place, place - place_in_unit(place, request_begin, unit_places)[1] + START_PLACES)
    return place, end, share_places, request, request_begin


@triton.jit
def begin_in_small_batch(number, batch, num_shares, least_places, TILE: tl.constexpr):
    """Return the work of program `number` in a batch of few requests: (first place, end, places per share, request of the
    first place, first place of this request, index of the share, places of a request and K/V head). A place is a key tile.

    Each request and K/V head has the same number of parts, and all parts have the same number of tiles. A program reads at
    most one part. If a request is too short to fill all its parts, the first ones are empty. But if lengths differ too much,
    the work is that of `begin_share`, and the last item is 0.

    A program computes its request and part from its number, so it need not wait for the lengths. Programs of the last parts,
    which are never empty, have the first numbers, because the GPU runs these programs on different multiprocessors. The time to
    begin and end a part is not counted, because it is the same for every part.
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
    if SMALL:
        return begin_in_small_batch(number, batch, num_shares, least_places, TILE)
    place, end, share_places, request, request_begin = begin_at_tile(number, batch, num_shares, least_places, TILE)
    return place, end, share_places, request, request_begin, number, tl.zeros([], tl.int64)


@triton.jit
def places_before(num_tiles, unit_places, START_PLACES: tl.constexpr):
    return tl.where(unit_places > 0, unit_places - num_tiles, START_PLACES)


@triton.jit
def place_in_unit(place, request_begin, unit_places):
    in_request = (place - request_begin).to(tl.uint32)
    places = unit_places.to(tl.uint32)
    return (in_request // places).to(tl.int64), (in_request % places).to(tl.int64)


@triton.jit
def next_unit(place, request, request_begin, request_end, batch_size, kind, START_PLACES: tl.constexpr):
    if place == request_end:
        request_begin = place
        request += 1
        if kind[1] is not None:
            while (request < batch_size) & (q_lens_of_kind(request, batch_size, kind) == 0):
                request += 1
    return place + START_PLACES, request, request_begin
