"""The warps of the paged Gluon kernel that convert e4m3 tiles to float16, the dtype of its matrix products.

The docstring of `hopper_attention` shows which group of warps waits for which.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lab.kernels.portable.hopper_pieces import piece_at


@gluon.jit
def convert(
    walk,  # where the program's work begins; a comment in `hopper_pieces` describes this tuple
    batch,  # the lengths and sizes of the batch, described there too
    loaded,
    rings,
    WHICH: gl.constexpr,  # 0: K; 1: V
    SHARED: gl.constexpr,  # True: programs divide the keys
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,  # query heads per K/V head
    TILE: gl.constexpr,  # `HopperTile`
):
    """Convert all K tiles (WHICH = 0) or V tiles (WHICH = 1) of the program from the e4m3 `Rings` `loaded` into `rings`."""
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
    """Write an e4m3 tile in float16 to slot `slot` of the ring of float16 tiles. `barriers` is (full and empty of the e4m3
    ring, full and empty of the float16 ring), and `parity` counts the uses of the slot.

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
