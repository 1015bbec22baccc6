"""The tile of a program: its query rows and the keys that it reads at a time. Loads of these keys from a paged pool."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from lab.kernels.portable.softmax import INTERPRETED


class ProgramTile(NamedTuple):
    """The work and resources of one program of a Triton kernel. A kernel takes it as one `tl.constexpr`."""

    rows: int  # query rows; a row is one query token and one head
    keys: int  # keys that the program reads at a time
    num_warps: int
    num_stages: int
    per_multiprocessor: int = 1  # programs that run on a multiprocessor at the same time
    start_keys: int = 256  # keys that a program reads in the time that it needs to begin and end a request and K/V head
    by_descriptor: bool = False  # TMA loads tiles that `tile_descriptor` describes; for MLA, only those without a mask
    # The softmax's denominator has one part per key of a tile until the last tile. Warps wait for each other less often; a
    # thread needs one more register per score.
    denominator_per_key: bool = False


class HopperTile(NamedTuple):
    """The work and resources of one program of a Gluon kernel for SM90. A kernel takes it as one `gl.constexpr`."""

    rows: int  # of all consumers, the warp groups that multiply; each consumer has 64
    keys: int  # keys that the program reads at a time
    stages: int  # tiles of K, and tiles of V, that shared memory holds at a time
    start_keys: int = 512  # keys that a program reads in the time that it needs to begin and end a request and K/V head
    per_multiprocessor: int = 1  # programs that run on a multiprocessor at the same time
    consumer_registers: int = 240  # of a thread of one of two consumers; the other, or a single one, gets what is left
    producer_registers: int = 24  # of each of the 128 threads that load and convert tiles


class PoolStrides(NamedTuple):
    """Strides in elements of a pool of K or V [num_pages, num_kv_heads, page_size, head_dim]."""

    page: int
    head: int
    token: int


def tile_descriptor(cache: torch.Tensor, tile: ProgramTile, dims: int) -> TensorDescriptor | None:
    """Return a TMA descriptor of the tiles of a pool; None if `tile.by_descriptor` is False or TMA cannot load them."""
    if not tile.by_descriptor or not loads_by_descriptor(cache, tile.keys):
        return None
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, 1, tile.keys, dims])


def loads_by_descriptor(cache: torch.Tensor, keys: int) -> bool:
    """Return True if TMA can and should load tiles of `keys` keys: not e4m3 tiles, which are converted to float16."""
    return is_described(cache) and cache.shape[2] % keys == 0 and cache.element_size() > 1


def is_described(cache: torch.Tensor) -> bool:
    return is_aligned(cache, strides_bytes=16) and cache.stride(3) == 1 and cache.numel() > 0


def is_aligned(cache: torch.Tensor, strides_bytes: int) -> bool:
    """Return True if a pool's address is a multiple of 16 bytes, and its first three strides multiples of `strides_bytes`."""
    strides = [stride * cache.element_size() for stride in cache.stride()[:3]]
    return cache.data_ptr() % 16 == 0 and all(stride % strides_bytes == 0 for stride in strides)


def paired(caches: tuple[torch.Tensor, torch.Tensor], tile: ProgramTile) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pools of K and V; e4m3 pools as int16, two elements in one, if their conversion to float16 is then faster:
    in tiles of fewer than 64 rows, whose products take K/V from registers. One instruction then prepares four elements for
    conversion (`halves_of_pairs`), and single elements would need several.
    """
    k_cache, v_cache = caches
    if k_cache.dtype != torch.float8_e4m3fn or tile.rows >= 64:
        return caches
    # Triton loads 16 bytes at a time only if it knows that strides are multiples of 16 elements, here of int16.
    if not all(is_aligned(cache, strides_bytes=32) and cache.storage_offset() % 16 == 0 for cache in caches):
        return caches
    return k_cache.view(torch.int16), v_cache.view(torch.int16)


@triton.jit
def page_ids(table, begin, end, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Return a tile's page ids, int64: one if a tile lies in one page, else one for each key. 0 for keys from `end` on."""
    if PAGE_SIZE % BLOCK_KEYS == 0:
        page = tl.load(table + begin // PAGE_SIZE, mask=begin < end, other=0)
    else:
        key = begin + tl.arange(0, BLOCK_KEYS)
        page = tl.load(table + key // PAGE_SIZE, mask=key < end, other=0)
    return page.to(tl.int64)


@triton.jit
def pool_offsets(page, begin, page_stride, token_stride, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Return the offset in the pool of each key of a tile, in elements, int64. `page` is the result of `page_ids`."""
    if PAGE_SIZE % BLOCK_KEYS == 0:
        in_page = begin % PAGE_SIZE + tl.arange(0, BLOCK_KEYS)
    else:
        in_page = (begin + tl.arange(0, BLOCK_KEYS)) % PAGE_SIZE
    return page * page_stride + in_page.to(tl.int64) * token_stride


@triton.jit
def described_tile(
    descriptor,
    page,  # a scalar, result of `page_ids`
    kv_head,  # int32
    begin,
    first_dim,  # first element of each key that is loaded
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DIMS: tl.constexpr,  # number of loaded elements of each key
):
    """Load the tile that begins at key `begin`, [BLOCK_KEYS, DIMS], through a TMA descriptor from `tile_descriptor`."""
    tile = descriptor.load([page.to(tl.int32), kv_head, begin % PAGE_SIZE, first_dim])
    return tl.reshape(tile, [BLOCK_KEYS, DIMS])


@triton.jit
def halves_of_pairs(pairs):
    """Return the first and the second e4m3 element of each int16 pair, as two float16 tensors."""
    if INTERPRETED:
        even = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        odd = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return even.to(tl.float16), odd.to(tl.float16)
    # Two pairs at a time, sorted by one permutation; a compiler makes six operations of the lines above.
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
