"""How keys are shared out, by itself: every program's share, against the same order laid out in Python."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from lab.kernels.key_shares import (
    BLOCK_REQUESTS,
    Shares,
    choose_shares,
    first_tile_of,
    reach_of,
    request_at,
    tiles_per_share,
)
from lab.kernels.triton_support import Tile
from tests.devices import DEVICES

BLOCK_KEYS = 32


@triton.jit
def _every_share(
    found, begins, seq_lens, window_left, max_q_len, batch_size, units, pieces, least_tiles, BLOCK_KEYS: tl.constexpr
):
    """Of each piece: the tiles of the batch, the share, the request it begins in and where that one begins."""
    piece = tl.program_id(0).to(tl.int64)
    reach = reach_of(window_left, max_q_len)
    total, share = tiles_per_share(seq_lens, batch_size, reach, units, pieces, least_tiles, BLOCK_KEYS)
    request, begin = request_at(piece * share, seq_lens, batch_size, reach, units, BLOCK_KEYS)
    tl.store(found + piece * 4, total)
    tl.store(found + piece * 4 + 1, share)
    tl.store(found + piece * 4 + 2, request)
    tl.store(found + piece * 4 + 3, begin)
    if piece < batch_size:
        tl.store(begins + piece, first_tile_of(piece, seq_lens, reach, units, BLOCK_KEYS))


def shares_on(
    device: str, lengths: list[int], *, window_left: int, units: int, pieces: int, least_tiles: int = 1
) -> tuple[list[list[int]], list[int]]:
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    found = torch.full((pieces, 4), -1, dtype=torch.int64, device=device)
    begins = torch.full((len(lengths),), -1, dtype=torch.int64, device=device)
    _every_share[(pieces,)](
        found, begins, seq_lens, window_left, 2, len(lengths), units, pieces, least_tiles, BLOCK_KEYS=BLOCK_KEYS
    )
    return found.tolist(), begins.tolist()


def tiles_of(length: int, window_left: int) -> int:
    """Tiles of BLOCK_KEYS from the one with the first key that one of two rows sees, one at least."""
    first = max(length - 2 - window_left, 0) // BLOCK_KEYS if window_left >= 0 else 0
    return max(-(-length // BLOCK_KEYS) - first, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_size", [1, 3, BLOCK_REQUESTS.value, 2 * BLOCK_REQUESTS.value + 5])
@pytest.mark.parametrize("window_left", [-1, 0, 90, 2**40])
@pytest.mark.parametrize(("units", "pieces", "least_tiles"), [(2, 7, 1), (3, 50, 2)])
def test_shares(device: str, batch_size: int, window_left: int, units: int, pieces: int, least_tiles: int) -> None:
    """Equal shares of an order in which each request has its tiles once per unit."""
    lengths = [(37 * request * request) % 1000 for request in range(batch_size)]
    found, begins = shares_on(
        device, lengths, window_left=window_left, units=units, pieces=pieces, least_tiles=least_tiles
    )
    tiles = [units * tiles_of(length, window_left) for length in lengths]
    ends = list(itertools.accumulate(tiles))
    expected_begins = [0, *ends[:-1]]
    share = max(-(-ends[-1] // pieces), least_tiles)
    for piece, (total, own, request, begin) in enumerate(found):
        assert (total, own) == (ends[-1], share)
        position = piece * share
        if position < total:
            assert request == next(index for index, end in enumerate(ends) if position < end)
            assert begin == expected_begins[request]
    assert begins[:pieces] == expected_begins[:pieces]


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_beyond_32_bits(device: str) -> None:
    """Positions, though no length and no request's tiles exceed them."""
    found, _ = shares_on(device, [2**30] * 40, window_left=-1, units=8, pieces=4)
    tiles = 8 * 2**30 // BLOCK_KEYS
    assert found == [[40 * tiles, 10 * tiles, 10 * piece, 10 * piece * tiles] for piece in range(4)]


@pytest.mark.parametrize(("q_blocks", "pieces"), [(1, 264), (2, 132), (100, 2), (1000, 1)])
def test_programs_run_at_a_time(monkeypatch: pytest.MonkeyPatch, q_blocks: int, pieces: int) -> None:
    monkeypatch.setattr("lab.kernels.key_shares.num_multiprocessors", lambda device: 132)
    tile = Tile(16, 64, num_warps=4, num_stages=3, per_multiprocessor=2)
    gpu = torch.device("cuda")
    assert choose_shares(tile, q_blocks, gpu) == Shares(pieces, 1)
    assert choose_shares(tile, q_blocks, gpu, least_keys=200) == Shares(pieces, 3)
    assert choose_shares(tile, q_blocks, torch.device("cpu")) == Shares(1)
