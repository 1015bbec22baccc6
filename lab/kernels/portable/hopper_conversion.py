"""The partitions of the Gluon kernel of paged attention that convert e4m3 tiles for products of 16 bits.

The docstring of `hopper_attention` shows which partition waits for which.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lab.kernels.portable.hopper_pieces import piece_at


@gluon.jit
def convert(
    walk,
    batch,
    loaded,
    rings,
    WHICH: gl.constexpr,  # 0: keys; 1: values
    SHARED: gl.constexpr,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
    TILE: gl.constexpr,
):
    """Convert the loaded keys (WHICH = 0) or values (1) of every piece to the dtype of the products."""
    converted = 0
    while walk[0] < walk[1]:
        piece, walk = piece_at(walk, batch, SHARED, CAUSAL, GROUP, TILE)
        for _ in range(piece.keys.num_tiles):
            slot = converted % TILE.stages
            parity = converted // TILE.stages & 1
            if WHICH == 0:
                barriers = (loaded.k_full, loaded.k_empty, rings.k_full, rings.k_empty)
                _convert_tile(loaded.k.index(slot), rings.k.index(slot), barriers, slot, parity)
            else:
                barriers = (loaded.v_full, loaded.v_empty, rings.v_full, rings.v_empty)
                _convert_tile(loaded.v.index(slot), rings.v.index(slot), barriers, slot, parity)
            converted += 1


@gluon.jit
def _convert_tile(loaded, converted, barriers, slot, parity):
    """Wait for a loaded tile, and write it to an empty slot in the slot's dtype.

    A warp loads half a tile before it writes the first element, so that it waits for shared memory only twice per tile.
    """
    DIMS: gl.constexpr = loaded.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIMS, DIMS // 8], [1, 1], [1, 0])
    PART: gl.constexpr = 1024 // DIMS  # keys; each thread converts 32 elements
    PARTS: gl.constexpr = loaded.shape[0] // PART // 2
    loaded_full, loaded_empty, full, empty = barriers
    mbarrier.wait(loaded_full.index(slot), parity)
    mbarrier.wait(empty.index(slot), parity ^ 1)
    for half in gl.static_range(2):
        parts = ()
        for part in gl.static_range(PARTS):
            parts = parts + (loaded.slice((half * PARTS + part) * PART, PART).load(LAYOUT),)  # noqa: RUF005 - Triton has no stars
        for part in gl.static_range(PARTS):
            converted.slice((half * PARTS + part) * PART, PART).store(parts[part].to(converted.dtype))
    fence_async_shared()  # products read it
    mbarrier.arrive(full.index(slot))
    mbarrier.arrive(loaded_empty.index(slot))
