"""Tiles by themselves: which one is chosen, pools of pairs, and the halves of a pair."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from lab.gpus import Capability
from lab.kernels.portable.mla_decode import choose_dot_dtype
from lab.kernels.portable.tile_choices import choose_mla_tile, choose_prefill_tile, choose_ragged_tile, choose_tile
from lab.kernels.portable.tiles import ProgramTile, halves_of_pairs, paired
from lab.kernels.support import triton_interprets
from tests.kernels.held import BF16, E4M3

TILE = ProgramTile(16, 64, num_warps=4, num_stages=3)


@triton.jit
def _store_halves(pairs, even, odd, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    even_half, odd_half = halves_of_pairs(tl.load(pairs + place))
    tl.store(even + place, even_half)
    tl.store(odd + place, odd_half)


@pytest.mark.parametrize(
    ("block", "every"),
    [
        pytest.param(2, range(255, 2**16 - 1, 255), id="one of a thread"),  # bytes 255 - high and high, for every high
        pytest.param(1024, range(2**16), id="several of a thread"),
    ],
)
def test_halves_of_every_pair(device: str, block: int, every: range) -> None:
    """NaNs among them, which the interpreter of Triton 3.7 takes for numbers."""
    pairs = torch.tensor(every, dtype=torch.int32).to(torch.int16).to(device)
    even, odd = (torch.empty(pairs.shape, dtype=torch.float16, device=device) for _ in range(2))
    _store_halves[(pairs.numel() // block,)](pairs, even, odd, BLOCK=block)
    elements = pairs.view(E4M3).to(torch.float16).view(-1, 2)
    asked = ~elements.isnan() if triton_interprets() else slice(None)
    halves = torch.stack([even, odd], 1)
    torch.testing.assert_close(halves[asked], elements[asked], rtol=0, atol=0, equal_nan=True)


def test_k_and_v_are_paired_together() -> None:
    pool = torch.zeros(4, 2, 16, 64, dtype=E4M3)
    assert [cache.dtype for cache in paired((pool, pool), TILE)] == [torch.int16] * 2
    odd = torch.zeros(4, 2, 16, 65, dtype=E4M3)[..., :64]
    moved = torch.zeros(4, 2, 16, 96, dtype=E4M3)[..., 2:66]  # 16 bytes at a time would begin 2 after a multiple
    narrow = torch.zeros(4, 2, 16, 80, dtype=E4M3)[..., :64]  # 40 pairs, which Triton would load one by one
    for other in (odd, moved, narrow):
        for caches in ((pool, other), (other, pool)):
            assert paired(caches, TILE) == caches
    assert paired((pool, pool), ProgramTile(64, 64, num_warps=4, num_stages=3)) == (pool, pool)
    halves = (pool.to(torch.float16), pool.to(torch.float16))
    assert paired(halves, TILE) == halves


ON_EVERY_GPU = pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
ROWS = pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 1000])


def least_size(rows: int, most: int) -> int:
    """Rows of the smallest tile that holds so many, or of the largest that there is."""
    return min(most, next(size for size in (16, 32, 64, 128, 8192) if size >= rows))


@ROWS
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("kv_bytes", [1, 2])
@ON_EVERY_GPU
def test_choose_tile(rows: int, head_dim: int, kv_bytes: int, capability: Capability | None) -> None:
    tile = choose_tile(rows, head_dim, kv_bytes, capability)
    most = 128 if capability in (None, (9, 0)) or (capability == (10, 0) and head_dim < 128) else 64
    if capability not in (None, (9, 0), (10, 0)) and head_dim > 128:
        most = 32
    assert tile.rows == least_size(rows, most)
    assert tile.keys in (16, 32, 64, 128)


def test_only_sm90_has_tiles_of_its_own_for_blocks_of_few_rows() -> None:
    for capability, rows, head_dim in (
        (None, 16, 64),
        ((9, 0), 32, 128),
        ((9, 0), 64, 128),
        ((9, 0), 16, 256),
        ((8, 0), 16, 64),
    ):
        tile = choose_tile(rows, head_dim, 2, capability)
        block = choose_prefill_tile(tile, head_dim, 2, True, capability)
        own = capability != (8, 0) and rows <= 32 and head_dim <= 128
        assert block == (tile._replace(keys=32, num_warps=2) if own else tile)


@pytest.mark.parametrize("capability", [None, (9, 0), (10, 0)])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_tma_loads_tiles_of_few_and_of_many_rows(capability: Capability | None, rows: int) -> None:
    tile = choose_tile(rows, 16, 2, capability)
    assert tile.by_descriptor == (rows == 128 or (rows <= 32 and capability != (10, 0)))


@ROWS
@pytest.mark.parametrize("kv_bytes", [1, 2])
@ON_EVERY_GPU
def test_choose_mla_tile(rows: int, kv_bytes: int, capability: Capability | None) -> None:
    tile = choose_mla_tile(rows, kv_bytes, capability)
    assert tile.rows == least_size(rows, {None: 64, (9, 0): 64, (10, 0): 16 * kv_bytes}.get(capability, 16))
    assert tile.keys in (32, 64)


@ROWS
@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (256, 256)])
@ON_EVERY_GPU
def test_choose_ragged_tile(rows: int, dims: tuple[int, int], capability: Capability | None) -> None:
    tile = choose_ragged_tile(rows, *dims, capability)
    roomy = capability in (None, (9, 0), (10, 0))
    assert tile.rows == least_size(rows, 128 if roomy and dims[0] < 256 else 64)
    # Q once, and K and V in each stage, all bf16: what shared memory must hold.
    held_bytes = 2 * (tile.rows * dims[0] + tile.num_stages * tile.keys * sum(dims))
    assert held_bytes <= (227 if roomy else 99) * 1024


@pytest.mark.parametrize(
    ("query", "rows", "expected"), [(BF16, 64, "bf16"), (BF16, 16, "fp16"), (E4M3, 64, "fp16"), (E4M3, 16, "fp16")]
)
def test_what_products_over_an_e4m3_cache_are_made_in(query: torch.dtype, rows: int, expected: str) -> None:
    problem = SimpleNamespace(query=SimpleNamespace(dtype=query), k_cache=SimpleNamespace(dtype=E4M3))
    assert str(choose_dot_dtype(problem, choose_mla_tile(rows, 1, (9, 0)))) == expected
