"""The tile of a program (its query rows and keys per step), and loads of a tile's keys from a paged pool."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from lab.kernels.portable.softmax import INTERPRETED


class ProgramTile(NamedTuple):
    """The work and resources of one program of a Triton kernel: query rows, keys per step, and Triton's launch options.

    It is a named tuple: Triton takes it as one compile-time argument, and a kernel reads its fields.

    Attributes:
        rows, keys: query rows and keys of one step of the program. A row is one query token and one head.
        num_warps, num_stages: Triton's launch options.
        per_multiprocessor: programs that run on a multiprocessor at the same time.
        start_keys: time to begin and end one request and K/V head, as the number of keys that a program could read in that
            time. The program then waits for the first keys and writes the results. A program with many short requests gets
            fewer keys.
        by_descriptor: TMA loads tiles if `tile_descriptor` can describe them; for MLA, only tiles without a mask.
        denominator_per_key: the softmax's denominator has one part per key of a tile, and the parts are added up after the last
            tile. Warps that compute the same rows wait for each other less often; a thread needs one more register per score.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    per_multiprocessor: int = 1
    start_keys: int = 256
    by_descriptor: bool = False
    denominator_per_key: bool = False


class HopperTile(NamedTuple):
    """The work and resources of one program of a Gluon kernel; a named tuple like `ProgramTile`.

    Attributes:
        rows: packed query rows of all consumers, the warp groups that multiply. Each consumer has 64.
        keys: keys of one tile.
        stages: tiles of K, and tiles of V, that shared memory holds at a time.
        start_keys, per_multiprocessor: as in `ProgramTile`.
        consumer_registers: registers of each of 128 threads of one of two consumers. The other one, or the only one, has the
            registers that are left: one consumer ignores this number.
        producer_registers: registers of each of the other 128 threads, which load tiles and convert them.
    """

    rows: int
    keys: int
    stages: int
    start_keys: int = 512
    per_multiprocessor: int = 1
    consumer_registers: int = 240
    producer_registers: int = 24


class PoolStrides(NamedTuple):
    """Strides of a pool of K or V [num_pages, num_kv_heads, page_size, head_dim], in elements."""

    page: int
    head: int
    token: int


def tile_descriptor(cache: torch.Tensor, tile: ProgramTile, dims: int) -> TensorDescriptor | None:
    """Return a TMA descriptor of a pool's tiles; None if the tile has no `by_descriptor` or TMA cannot load the tiles.

    `dims` are the elements of head_dim in a tile, a power of two.
    """
    if not tile.by_descriptor or not loads_by_descriptor(cache, tile.keys):
        return None
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, 1, tile.keys, dims])


def loads_by_descriptor(cache: torch.Tensor, keys: int) -> bool:
    """Return True if TMA can load tiles of `keys` keys from one page of the pool, and this saves time.

    An e4m3 tile is converted before it is multiplied, and gains nothing.
    """
    aligned = is_aligned(cache, strides_bytes=16) and cache.stride(3) == 1
    return aligned and cache.numel() > 0 and cache.shape[2] % keys == 0 and cache.element_size() > 1


def is_aligned(cache: torch.Tensor, strides_bytes: int) -> bool:
    """Return True if a pool's address is a multiple of 16 bytes, and its first three strides of `strides_bytes`."""
    strides = [stride * cache.element_size() for stride in cache.stride()[:3]]
    return cache.data_ptr() % 16 == 0 and all(stride % strides_bytes == 0 for stride in strides)


def paired(caches: tuple[torch.Tensor, torch.Tensor], tile: ProgramTile) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pools of K and V, viewed as int16 pairs of e4m3 elements if this makes the conversion to float16 faster.

    It does so if products take K/V from registers: in tiles of fewer than 64 rows. A register for a product holds two float16
    elements, a loaded register four e4m3 elements. One permutation of bytes sorts pairs (`halves_of_pairs`); single bytes would
    have to be masked, shifted and moved one by one. Other pools are returned unchanged.
    """
    k_cache, v_cache = caches
    if k_cache.dtype != torch.float8_e4m3fn or tile.rows >= 64:
        return caches
    # Triton loads 16 bytes at a time where it sees strides of multiples of 16 elements, be they bytes or pairs.
    if not all(is_aligned(cache, strides_bytes=32) and cache.storage_offset() % 16 == 0 for cache in caches):
        return caches
    return k_cache.view(torch.int16), v_cache.view(torch.int16)


@triton.jit
def page_ids(table, begin, end, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Return the page ids of the tile that begins at key `begin`, int64: one if a page holds the whole tile, else one per key.

    A tile begins at a multiple of BLOCK_KEYS. Ids of keys from `end` on are not read: they are 0.
    """
    if PAGE_SIZE % BLOCK_KEYS == 0:
        page = tl.load(table + begin // PAGE_SIZE, mask=begin < end, other=0)
    else:
        key = begin + tl.arange(0, BLOCK_KEYS)
        page = tl.load(table + key // PAGE_SIZE, mask=key < end, other=0)
    return page.to(tl.int64)


@triton.jit
def pool_offsets(page, begin, page_stride, token_stride, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Return the offset of each key of a tile in the pool, in elements, int64 [BLOCK_KEYS]. `page` is from `page_ids`."""
    if PAGE_SIZE % BLOCK_KEYS == 0:
        in_page = begin % PAGE_SIZE + tl.arange(0, BLOCK_KEYS)
    else:
        in_page = (begin + tl.arange(0, BLOCK_KEYS)) % PAGE_SIZE
    return page * page_stride + in_page.to(tl.int64) * token_stride


@triton.jit
def described_tile(
    descriptor,
    page,
    kv_head,  # int32
    begin,
    first_dim,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Load the tile that begins at key `begin`, [BLOCK_KEYS, DIMS], through a TMA descriptor from `tile_descriptor`."""
    tile = descriptor.load([page.to(tl.int32), kv_head, begin % PAGE_SIZE, first_dim])
    return tl.reshape(tile, [BLOCK_KEYS, DIMS])


@triton.jit
def halves_of_pairs(pairs):
    """Return (the first elements, the second elements) of int16 `pairs` of e4m3 elements, in float16."""
    if INTERPRETED:
        even = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        odd = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return even.to(tl.float16), odd.to(tl.float16)
    # Two pairs at a time, sorted by one permutation; compilers make six operations of the lines above.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 even, odd;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {even, odd}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, even;
        cvt.rn.f16x2.e4m3x2 $1, odd;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
