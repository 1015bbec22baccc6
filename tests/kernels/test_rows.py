"""The keys that rows see, by themselves: their bounds against the mask."""

import pytest
import torch
import triton
import triton.language as tl

from lab.kernels.portable.rows import keys_of_block, row_bounds, visible_keys
from lab.kernels.portable.tiles import ProgramTile

ROWS, KEYS = 32, 64


@triton.jit
def _write_both(
    bounded, visible, kv_len, q_len, window_left, CAUSAL: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr
):
    """Write what each row sees of the first KEYS keys, by `row_bounds` and by `visible_keys`."""
    row, key = tl.arange(0, TILE.rows), tl.arange(0, TILE.keys)
    keys = keys_of_block(0, tl.to_tensor(0), tl.to_tensor(1), kv_len, q_len, 0, window_left, 0, CAUSAL, GROUP, TILE)
    token = row // GROUP
    position = kv_len - q_len + token
    first, end = row_bounds(position, keys, window_left, CAUSAL)
    place = row[:, None] * TILE.keys + key[None, :]
    tl.store(
        bounded + place, (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None]) & (token < q_len)[:, None]
    )
    exists = (key >= keys.first_key) & (key < keys.end)
    seen = visible_keys(key, exists, position, token < q_len, keys, None, row, window_left, 0, CAUSAL)
    tl.store(visible + place, seen)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 0, 5, 100])
@pytest.mark.parametrize(("kv_len", "q_len"), [(64, 16), (40, 16), (10, 16), (0, 3), (64, 1), (50, 7)])
def test_bounds_are_the_mask(device: str, causal: bool, window_left: int, kv_len: int, q_len: int) -> None:
    bounded, visible = (torch.full((ROWS, KEYS), 7, dtype=torch.int8, device=device) for _ in range(2))
    tile = ProgramTile(ROWS, KEYS, num_warps=4, num_stages=1)
    _write_both[(1,)](bounded, visible, kv_len, q_len, window_left, CAUSAL=causal, TILE=tile, GROUP=2)
    torch.testing.assert_close(bounded, visible, rtol=0, atol=0)
