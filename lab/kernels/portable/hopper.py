"""Host code of the Gluon kernels for SM90, which serve calls bound by matrix products."""

from typing import Any, NamedTuple

import torch
import triton

from lab.calls.problem import E4M3, HALF_DTYPES, PagedAttention
from lab.gpus import capability_of
from lab.kernels.portable.key_shares import Shares, num_multiprocessors
from lab.kernels.portable.merge import with_merge
from lab.kernels.portable.partial_results import Results, new_partials
from lab.kernels.portable.tiles import HopperTile, is_described
from lab.kernels.portable.triton_call import TritonLaunch
from lab.kernels.support import triton_interprets


class HopperTiles(NamedTuple):
    blocks: HopperTile  # for launches that are bound by matrix products
    windows: HopperTile  # for windows of fewer than `few_keys` keys, in which a program reads all keys of its rows
    shares: HopperTile  # for requests of one block of rows, whose keys several programs divide
    few_keys: int = 512


# By head_dim. Of 227 KiB of shared memory, queries take 2 * rows * head_dim bytes, each stage of K and V 4 * keys * head_dim.
# `blocks` are bound by products: large tiles, and as many stages as fit. `shares` are bound by reads: small tiles, because the
# keys of a request's last tile are read in vain. Tiles of 64 rows, several programs on a multiprocessor, are for work whose
# products take less time than its softmax (heads of 64) or its start and end (windows). With heads of 128 they are faster in
# windows of 512 keys and slower in windows of 1,024. With heads of 64 `windows` is faster up to 2,048 keys, the longest window
# that was timed (results/nvidia-h200/kernels.md, "Programs of 64 rows").
TILES = {
    64: HopperTiles(
        blocks=HopperTile(64, 128, stages=3, per_multiprocessor=2),
        windows=HopperTile(64, 64, stages=3, per_multiprocessor=3),
        shares=HopperTile(128, 64, stages=8),
        few_keys=2048,
    ),
    128: HopperTiles(
        blocks=HopperTile(128, 128, stages=3),
        windows=HopperTile(64, 64, stages=3, per_multiprocessor=2),
        shares=HopperTile(128, 64, stages=4),
    ),
    256: HopperTiles(
        blocks=HopperTile(128, 64, stages=2),
        windows=HopperTile(128, 64, stages=2),
        shares=HopperTile(128, 64, stages=2),
    ),
}
# By (kv_lora_rank, qk_rope_head_dim). Of 227 KiB of shared memory, queries take 72, each of two tiles 72, and the weights 8.
MLA_TILES = {(512, 64): HopperTile(64, 64, stages=2, start_keys=256, consumer_registers=232, producer_registers=40)}
# Over e4m3, by head_dim. Each stage has a tile in e4m3, as it is loaded, and one in float16. A tile of 64 rows has one
# consumer, which waits for its own products: a multiprocessor runs two programs. Only a window of 128 keys was timed.
E4M3_TILES = {
    head_dim: HopperTiles(
        blocks=HopperTile(128, 64, stages=stages, consumer_registers=208, producer_registers=88),
        windows=HopperTile(64, 64, stages=one_stages, per_multiprocessor=2, producer_registers=88),
        shares=HopperTile(64, 64, stages=one_stages, per_multiprocessor=2, producer_registers=88),
    )
    for head_dim, stages, one_stages in ((64, 6, 4), (128, 3, 2))
}
# Smallest number of rows of a request and K/V head for which the Gluon kernels are used, over 16-bit K/V, over e4m3, for MLA.
LEAST_ROWS = 65  # the Triton kernel's tiles of 64 rows are bound by reading K/V
LEAST_E4M3_ROWS = 17  # the Triton kernel's tiles of 32 rows and more do not load the next keys during a conversion
LEAST_MLA_ROWS = 17  # with 32 rows the Gluon kernel is a quarter faster, with 16 rows slower
LEAST_PAGE = 16  # tokens
REGISTERS = 65536  # of a multiprocessor


def hopper_tiles(problem: PagedAttention) -> HopperTiles | None:
    """Return the paged Gluon kernel's tiles; None if this kernel does not support the call or the Triton kernel is faster."""
    is_e4m3 = problem.k_cache.dtype == E4M3
    tiles = (E4M3_TILES if is_e4m3 else TILES).get(problem.head_dim)
    if tiles is None or problem.mask is not None or problem.v_head_dim != problem.head_dim or problem.is_block_sparse:
        return None
    if not is_e4m3 and problem.k_cache.dtype != problem.query.dtype:
        return None
    caches = (problem.k_cache, problem.v_cache)
    return tiles if _fits(problem, caches, tiles[:3], LEAST_E4M3_ROWS if is_e4m3 else LEAST_ROWS) else None


def hopper_mla_tile(problem: PagedAttention) -> HopperTile | None:
    """Return the tile of MLA's Gluon kernel; None if this kernel does not support the call or the Triton kernel is faster."""
    tile = MLA_TILES.get((problem.v_head_dim, problem.head_dim - problem.v_head_dim))
    if tile is None or problem.k_cache.dtype != problem.query.dtype or problem.selected is not None:
        return None
    return tile if _fits(problem, (problem.k_cache,), (tile,), LEAST_MLA_ROWS) else None


def _fits(
    problem: PagedAttention, caches: tuple[torch.Tensor, ...], tiles: tuple[HopperTile, ...], least_rows: int
) -> bool:
    if triton_interprets():  # the interpreter does not run Gluon
        return False
    rows = problem.max_q_len * problem.group
    if capability_of(problem.query.device) != (9, 0) or rows < least_rows:
        return False
    if problem.query.dtype not in HALF_DTYPES or problem.query.stride(2) != 1:
        return False
    if not all(cache.dtype == caches[0].dtype and is_described(cache) for cache in caches):
        return False
    page = problem.page_size
    return all(page % tile.keys == 0 or (tile.keys % page == 0 and page >= LEAST_PAGE) for tile in tiles)


def hopper_launches(
    problem: PagedAttention, results: Results, tile: HopperTile, shares: Shares | None, least_q_len: int | None
) -> list[TritonLaunch]:
    from lab.kernels.portable.hopper_attention import hopper_attention_kernel

    q_blocks = triton.cdiv(problem.max_q_len * problem.group, tile.rows)
    partials = new_partials(shares, q_blocks, tile.rows, problem)
    blocks = q_blocks * problem.num_kv_heads * problem.batch_size
    programs = tile.per_multiprocessor * num_multiprocessors(problem.query.device)
    threads = 2 * tile.rows + 128
    is_second = least_q_len is not None and least_q_len > 1
    attention = TritonLaunch(
        hopper_attention_kernel,
        (min(blocks, programs), 1) if shares is None else (q_blocks, shares.count),
        problem.query,
        _boxes(problem.k_cache, tile),
        _boxes(problem.v_cache, tile),
        (problem.k_block_tables, problem.v_block_tables),
        problem.seq_lens,
        problem.cu_seqlens_q,
        problem.sinks,
        problem.scales,
        results,
        partials,
        least_q_len,
        problem.max_q_len,
        problem.window_left,
        problem.batch_size,
        problem.num_kv_heads,
        0 if shares is None else shares.count,
        0 if shares is None else shares.least_places,
        problem.query.stride()[:2],
        (problem.k_block_tables.stride(0), problem.v_block_tables.stride(0)),
        GROUP=problem.group,
        HEAD_DIM=problem.head_dim,
        PAGE_SIZE=problem.page_size,
        CAUSAL=problem.causal,
        SHARED=shares is not None,
        TILE=tile,
        OVERLAPS=partials is not None or least_q_len is not None,
        OVERLAPPED=is_second,
        scratch=partials or (),
        num_warps=4,
        maxnreg=REGISTERS // (tile.per_multiprocessor * threads) // 8 * 8,
        launch_pdl=is_second,
    )
    return with_merge(attention, partials, problem, q_blocks, results, least_q_len)


def hopper_mla_launches(
    problem: PagedAttention, results: Results, tile: HopperTile, shares: Shares
) -> list[TritonLaunch]:
    from lab.kernels.portable.hopper_mla import hopper_mla_kernel

    q_blocks = triton.cdiv(problem.max_q_len * problem.num_qo_heads, tile.rows)
    partials = new_partials(shares, q_blocks, tile.rows, problem)
    attention = TritonLaunch(
        hopper_mla_kernel,
        (q_blocks, shares.count),
        problem.query,
        _boxes(problem.k_cache, tile),
        problem.k_block_tables,
        problem.seq_lens,
        problem.cu_seqlens_q,
        problem.sinks,
        problem.scales,
        results,
        partials,
        problem.max_q_len,
        problem.batch_size,
        shares.count,
        shares.least_places,
        problem.query.stride()[:2],
        problem.k_block_tables.stride(0),
        HEADS=problem.num_qo_heads,
        RANK=problem.v_head_dim,
        ROPE=problem.head_dim - problem.v_head_dim,
        PAGE_SIZE=problem.page_size,
        TILE=tile,
        OVERLAPS=partials is not None,
        scratch=partials or (),
        num_warps=4,
    )
    return with_merge(attention, partials, problem, q_blocks, results)


def _boxes(cache: torch.Tensor, tile: HopperTile) -> Any:
    """Return the TMA descriptor of a pool. One copy loads keys of one page, and of each key at most BOX_BYTES bytes."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from lab.kernels.portable.hopper_pieces import BOX_BYTES

    element_bytes = cache.element_size()
    box_bytes = min(BOX_BYTES.value, cache.shape[3] * element_bytes)
    box = [1, 1, min(tile.keys, cache.shape[2]), box_bytes // element_bytes]
    layout = NVMMASharedLayout(box_bytes, 8 * element_bytes, 4)
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), box, layout)
