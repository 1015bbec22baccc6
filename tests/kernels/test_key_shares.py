"""Shares of keys, by themselves: every program's share, against the same order laid out in Python."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from lab.kernels.portable.key_shares import (
    BLOCK_REQUESTS,
    CUT_KEYS,
    CUT_KEYS_OF_ROW,
    WARP_REQUESTS,
    Shares,
    begin_in_small_batch,
    begin_share,
    choose_shares,
    reach_of,
)
from lab.kernels.portable.merge import merge_block
from lab.kernels.portable.rows import block_at
from lab.kernels.portable.tiles import ProgramTile

BLOCK_KEYS = 32
START_PLACES = 8
TILE = ProgramTile(16, BLOCK_KEYS, num_warps=4, num_stages=2, start_keys=START_PLACES * BLOCK_KEYS)


@triton.jit
def _every_share(
    found,
    seq_lens,
    cu_seqlens_q,
    least_q_len,
    most_q_len,
    window_left,
    max_q_len,
    batch_size,
    num_kv_heads,
    num_shares,
    least_places,
    step,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write of every `step`-th share: its number, its end, its places, those of each unit, the request of its first place, the
    first place of that.
    """
    number = tl.program_id(0).to(tl.int64) * step
    found += tl.program_id(0) * 6
    reach = reach_of(window_left, max_q_len)
    kind = (cu_seqlens_q, least_q_len, most_q_len)
    lanes = tl.arange(0, LANES if LANES > 0 else BLOCK_REQUESTS)
    batch = (seq_lens, batch_size, reach, num_kv_heads, kind, lanes)
    if LANES > 0:
        begun = begin_in_small_batch(number, batch, num_shares, least_places, TILE)
        _, end, share, request, begin, number, unit = begun
    else:
        _, end, share, request, begin = begin_share(number, batch, num_shares, least_places, TILE)
        unit = tl.zeros([], tl.int64)
    tl.store(found, number)
    tl.store(found + 1, end)
    tl.store(found + 2, share)
    tl.store(found + 3, unit)
    tl.store(found + 4, request)
    tl.store(found + 5, begin)


@triton.jit
def _every_block(found, cu_seqlens_q, least_q_len, most_q_len, batch_size, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Write of each block of rows of a kind: its request, its number in it, the requests with blocks from it on, all blocks."""
    number = tl.program_id(0)
    kind = (cu_seqlens_q, least_q_len, most_q_len)
    request, begin, left, blocks = block_at(number, batch_size, kind, tl.arange(0, BLOCK_REQUESTS), GROUP, ROWS)
    tl.store(found + number * 4, request)
    tl.store(found + number * 4 + 1, number - begin)
    tl.store(found + number * 4 + 2, left)
    tl.store(found + number * 4 + 3, blocks)


def row_offsets(q_lens: list[int], device: str) -> torch.Tensor:
    return torch.tensor(list(itertools.accumulate(q_lens, initial=0)), dtype=torch.int32, device=device)


def shares_on(
    device: str,
    lengths: list[int],
    *,
    window_left: int,
    num_kv_heads: int,
    num_shares: int,
    least_places: int = 1,
    q_lens: list[int] | None = None,
    kind: tuple[int | None, int | None] = (None, None),
    lanes: int = 0,
    tile: ProgramTile = TILE,
    most: int = 64,
) -> list[list[int]]:
    """Return what `_every_share` writes of all shares, or of `most` of them at equal distances."""
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    step = -(-num_shares // most)
    found = torch.full((-(-num_shares // step), 6), -1, dtype=torch.int64, device=device)
    _every_share[(len(found),)](
        found,
        seq_lens,
        None if q_lens is None else row_offsets(q_lens, device),
        *kind,
        window_left,
        2,
        len(lengths),
        num_kv_heads,
        num_shares,
        least_places,
        step,
        TILE=tile,
        LANES=lanes,
    )
    return found.tolist()


def places_of(length: int, window_left: int) -> int:
    """Tiles of BLOCK_KEYS from the one with the first key that one of two rows sees, one at least, and the empty places."""
    first = max(length - 2 - window_left, 0) // BLOCK_KEYS if window_left >= 0 else 0
    return max(-(-length // BLOCK_KEYS) - first, 1) + START_PLACES


def share_of(places: list[int], num_kv_heads: int, num_shares: int, least_places: int) -> int:
    """`places` are each request's, of all its units."""
    equal = max(-(-sum(places) // num_shares), least_places)
    longest = max(places) // num_kv_heads
    num_units = len(places) * num_kv_heads
    per_unit = max(1, num_shares // num_units)
    even = max(-(-longest // per_unit) * -(-num_units // num_shares), least_places)
    most = (CUT_KEYS.value + CUT_KEYS_OF_ROW.value * TILE.rows) // BLOCK_KEYS
    return even if even <= equal + most else equal


def hold_shares(found: list[list[int]], places: list[int], share: int) -> None:
    """Equal shares of an order with a request's places, of all its units, once."""
    ends = list(itertools.accumulate(places))
    for number, end, own, unit, request, begin in found:
        place = number * share
        assert (end, own, unit) == (min(place + share, ends[-1]), share, 0)
        if place < ends[-1]:
            assert request == next(index for index, end in enumerate(ends) if place < end)
            assert begin == ends[request] - places[request]


@pytest.mark.parametrize(
    ("requests", "keys", "num_shares", "tile", "share"),
    [
        (64, 4096, 264, TILE, 136),  # a program each, where 132 would cut nearly all
        (64, 4096, 132, TILE, 272),  # two each
        (16, 32768, 264, TILE, 258),  # four equal parts of each
        (64, 4096, 200, TILE, 175),  # 272 would be too unequal
        (1, 81920, 264, TILE, 39),
        # 4 of 256 units for each program are 15 tiles more than an equal share: a cut costs more in a tile of more rows
        (64, 4096, 66, TILE._replace(start_keys=64), 505),
        (64, 4096, 66, TILE._replace(start_keys=64, rows=128), 520),
    ],
)
def test_requests_of_one_length_are_cut_evenly_or_not(
    device: str, requests: int, keys: int, num_shares: int, tile: ProgramTile, share: int
) -> None:
    """With 4 K/V heads."""
    found = shares_on(
        device, [keys] * requests, window_left=-1, num_kv_heads=4, num_shares=num_shares, tile=tile, most=1
    )
    assert found[0][2] == share


@pytest.mark.parametrize("batch_size", [1, 3, BLOCK_REQUESTS.value, 2 * BLOCK_REQUESTS.value + 5])
@pytest.mark.parametrize(
    ("window_left", "kind"),
    [(-1, None), (0, None), (90, None), (2**40, None), (90, (1, 2)), (90, (2, 2)), (90, (5, 9))],
)
def test_shares(device: str, batch_size: int, window_left: int, kind: tuple[int, int] | None) -> None:
    """Equal shares, unless requests of one length ask for others, of an order with a request's places once per unit.

    Requests of another kind have no places, and those without rows are of no kind; (5, 9) is nobody's.
    """
    lengths = [(37 * request * request) % 1000 for request in range(batch_size)]
    q_lens = [(3 * request + 2) % 5 for request in range(batch_size)]
    chosen = [kind is None or kind[0] <= q_len <= kind[1] for q_len in q_lens]
    heads, num_shares, least_places = (3, 50, 2) if kind is None else (2, 7, 1)
    of_kind = {} if kind is None else {"q_lens": q_lens, "kind": kind}
    rule = {"window_left": window_left, "num_kv_heads": heads, "num_shares": num_shares, "least_places": least_places}
    found = shares_on(device, lengths, **rule, **of_kind)
    places = [heads * places_of(length, window_left) * of for length, of in zip(lengths, chosen, strict=True)]
    live = [each for each in places if each]
    hold_shares(found, places, share_of(live, heads, num_shares, least_places) if live else found[0][2])


@pytest.mark.parametrize("batch_size", [1, 4, BLOCK_REQUESTS.value + 5])
def test_blocks_of_a_kind(device: str, batch_size: int) -> None:
    """Blocks of 16 rows, 3 for each query token, of requests with 5 to 40 tokens; those after the last do not exist."""
    q_lens = [(11 * request + 4) % 43 for request in range(batch_size)]
    blocks = [-(-3 * q_len // 16) if 5 <= q_len <= 40 else 0 for q_len in q_lens]
    expected = [
        [request, block, sum(each > 0 for each in blocks[request:]), sum(blocks)]
        for request, of_request in enumerate(blocks)
        for block in range(of_request)
    ]
    expected += [[batch_size, block, 0, sum(blocks)] for block in range(2)]
    found = torch.full((len(expected), 4), -1, dtype=torch.int32, device=device)
    _every_block[(len(found),)](found, row_offsets(q_lens, device), 5, 40, batch_size, GROUP=3, ROWS=16)
    assert found.tolist() == expected


def test_a_batch_beyond_32_bits(device: str) -> None:
    """Places, though no length and no request's places exceed them."""
    found = shares_on(device, [2**30] * 40, window_left=-1, num_kv_heads=8, num_shares=4)
    places = 8 * places_of(2**30, -1)
    share = 10 * places
    expected = [[number, share * (number + 1), share, 0, 10 * number, share * number] for number in range(4)]
    assert found == expected


@pytest.mark.parametrize(
    ("lengths", "num_shares", "least_places", "share", "unit"),
    [
        ([512] * 16, 264, 1, 4, 16),  # four parts of 4 tiles, of which none is smaller
        ([512], 264, 4, 4, 264),  # four parts, as small as are worth a program
        ([1024], 264, 4, 8, 528),  # four parts, where more would have to be as large
        ([4096], 264, 4, 8, 528),  # more than four parts are twice as large
        ([4096, 2048], 264, 1, 4, 132),  # every unit has the places of the longest, an eighth of all programs each
        ([512] * WARP_REQUESTS.value, 264, 1, 8, 16),  # two parts
        ([512] * 31 + [4096], 264, 1, 14, 0),  # too unequal
        ([4096] * WARP_REQUESTS.value, 132, 1, 128, 128),  # a program for each unit
        ([512] * 33, 396, 1, 6, 18),  # three parts of the most lanes
        ([512] * 99 + [480], 800, 1, 8, 16),
        ([512] * BLOCK_REQUESTS.value, 1024, 1, 8, 16),
    ],
)
def test_units_of_a_small_batch_are_cut_into_equal_parts(
    device: str, lengths: list[int], num_shares: int, least_places: int, share: int, unit: int
) -> None:
    """With 4 K/V heads; shares follow each other, and the first place of each is one of the request that is found for it."""
    found = shares_on(
        device,
        lengths,
        window_left=-1,
        num_kv_heads=4,
        num_shares=num_shares,
        least_places=least_places,
        lanes=next(most for most in (WARP_REQUESTS.value, BLOCK_REQUESTS.value) if len(lengths) <= most),
    )
    places = [unit or places_of(length, -1) for length in lengths]
    total = 4 * sum(places)
    for number, end, own, of_unit, request, begin in found:
        assert (own, of_unit) == (share, unit)
        assert max(end, number * share) == max(min((number + 1) * share, total), number * share)
        if number * share < total:
            assert begin == 4 * sum(places[:request])
            assert begin <= number * share < begin + 4 * places[request]


@pytest.mark.parametrize(("q_blocks", "num_shares"), [(1, 264), (2, 132), (100, 2), (1000, 1)])
def test_programs_run_at_a_time(h200: None, q_blocks: int, num_shares: int) -> None:
    tile = ProgramTile(16, 64, num_warps=4, num_stages=3, per_multiprocessor=2)
    gpu = torch.device("cuda")
    assert choose_shares(tile, q_blocks, gpu) == Shares(num_shares, 1)
    assert choose_shares(tile, q_blocks, gpu, least_keys=200) == Shares(num_shares, 3)
    assert choose_shares(tile, q_blocks, torch.device("cpu")) == Shares(1)


@pytest.mark.parametrize(
    ("num_rows", "head_dim", "block"),
    [
        (8, 128, (1, 32, 64)),
        (8, 16, (1, 16, 128)),
        (2047, 128, (1, 32, 64)),
        (128, 512, (1, 32, 64)),
        (2048, 128, (4, 128, 1)),
        (1024, 512, (4, 128, 1)),
        (16_383, 128, (4, 128, 1)),
        (16_384, 128, (16, 128, 1)),
        (100_000, 64, (16, 64, 1)),
        (2**20, 512, (4, 512, 1)),
    ],
)
def test_a_merge_has_programs_enough_to_fill_a_gpu(num_rows: int, head_dim: int, block: tuple[int, int, int]) -> None:
    assert merge_block(num_rows, head_dim) == block
