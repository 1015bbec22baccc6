"""Pools of pairs, and the halves of a pair; `test_compiled_choices.py` has which tile each GPU gets."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from lab.kernels.portable.mla_decode import choose_dot_dtype
from lab.kernels.portable.tile_choices import choose_mla_tile
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


@pytest.mark.parametrize(
    ("query", "rows", "expected"), [(BF16, 64, "bf16"), (BF16, 16, "fp16"), (E4M3, 64, "fp16"), (E4M3, 16, "fp16")]
)
def test_what_products_over_an_e4m3_cache_are_made_in(query: torch.dtype, rows: int, expected: str) -> None:
    problem = SimpleNamespace(query=SimpleNamespace(dtype=query), k_cache=SimpleNamespace(dtype=E4M3))
    assert str(choose_dot_dtype(problem, choose_mla_tile(rows, 1, (9, 0)))) == expected
