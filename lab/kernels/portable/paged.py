"""FlashInfer's TRT-LLM attention functions in Triton: any NVIDIA GPU that Triton compiles for, and a CPU in its interpreter.

One kernel serves decode, verify, draft extend and extend. The query rows of a request and the query heads that share a K/V
head are packed into one tile, so K/V is read once for all of them. The keys of the batch are shared out evenly among programs,
whose partial results a second kernel merges (`lab.kernels.portable.key_shares`). Only in a prefill, where query rows alone fill
the GPU, has each block of them a program. Lengths stay on the device: nothing is read back, and no length is compiled in.
On SM90, what the products limit has a kernel in Gluon (`lab.kernels.portable.hopper_attention`).
Latent attention (MLA) has a kernel of its own, in `mla_decode`, and so has its prefill before absorption, in `ragged_context`.
"""

from collections.abc import Callable
from dataclasses import replace

import triton

from lab.calls import ContextCall, DecodeCall, takes
from lab.calls.arguments import following_scale
from lab.calls.problem import PagedAttention, check_values
from lab.gpus import capability_of
from lab.kernels.portable.hopper import hopper_launches, hopper_tiles
from lab.kernels.portable.kept_calls import kept_at_once
from lab.kernels.portable.key_shares import Shares, choose_shares
from lab.kernels.portable.paged_kernel import Strides, _attention_kernel
from lab.kernels.portable.partial_results import Results, new_partials, overlaps_launches, with_merge
from lab.kernels.portable.softmax import dot_dtype
from lab.kernels.portable.tile_choices import choose_prefill_tile, choose_tile
from lab.kernels.portable.tiles import (
    HopperTile,
    PoolStrides,
    ProgramTile,
    loads_by_descriptor,
    paired,
    tile_descriptor,
)
from lab.kernels.portable.triton_call import TritonCall, TritonLaunch, prepared
from lab.kernels.support.portable import PORTABLE

# A prefix so many times as long as the query rows is long: then a block of rows sees about as many keys as any other.
LONG_PREFIX = 4


@takes(DecodeCall)
def prepare_trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> TritonCall:
    """Prepare attention of the last query tokens of each request over its paged K/V: decode, verify, draft extend.

    Parameters, shapes, dtypes and errors are `lab.calls.DecodeCall`'s; what this kernel does not take raises
    NotImplementedError with the reason of `lab.kernels.support.why_not`. On a GPU, lengths and page ids are not read:
    `lab.calls.check_values` checks them on request. Accumulates in float32; `workspace_buffer` is not used.

    Returns:
        The call, which returns out [num_rows, num_qo_heads, head_dim]; with `return_lse`, (out, lse), lse in base 2.
    """
    problem = call.problem()
    if call.bmm1_scale_log2 is None:
        return _prepare(problem)
    # The problem's scale was made of the tensor's contents, which may change from call to call.
    scale, refresh = following_scale(call.bmm1_scale_log2)
    return _prepare(replace(problem, bmm1_scale=scale), refresh)


@takes(ContextCall)
def prepare_trtllm_batch_context_with_kv_cache(call: ContextCall) -> TritonCall:
    """Prepare attention of each request's newest query tokens, as many as it has, over its paged K/V: extend and prefill.

    Parameters, shapes, dtypes and errors are `lab.calls.ContextCall`'s; the rest is as in
    `trtllm_batch_decode_with_kv_cache`.
    """
    return _prepare(call.problem())


trtllm_batch_decode_with_kv_cache = kept_at_once(prepare_trtllm_batch_decode_with_kv_cache)
trtllm_batch_context_with_kv_cache = kept_at_once(prepare_trtllm_batch_context_with_kv_cache)


def _prepare(problem: PagedAttention, *refreshes: Callable[[], object]) -> TritonCall:
    return prepared(PORTABLE, problem, check_values, lambda *results: [*refreshes, *_launches(problem, results)])


def shares_of(problem: PagedAttention, tile: ProgramTile | HopperTile, q_blocks: int) -> Shares | None:
    """Return the shares of the keys; None where each block of rows and K/V head has a program for all keys that it sees.

    Shares take every block of a request to see as many keys, which holds where a prefix is long beside the rows.
    """
    shares = choose_shares(tile, q_blocks, problem.query.device)
    blocks = q_blocks * problem.num_kv_heads * problem.batch_size
    if problem.max_kv_len < LONG_PREFIX * problem.max_q_len and blocks >= q_blocks * shares.count:
        return None
    return shares


def _launches(problem: PagedAttention, results: Results) -> list[TritonLaunch]:
    group = problem.num_qo_heads // problem.num_kv_heads
    hopper = hopper_tiles(problem)
    if hopper is not None:
        shares = shares_of(problem, hopper.shares, triton.cdiv(problem.max_q_len * group, hopper.shares.rows))
        return hopper_launches(problem, results, hopper.blocks if shares is None else hopper.shares, shares)
    packed_rows = problem.max_q_len * group
    kv_bytes = problem.k_cache.element_size()
    capability = capability_of(problem.query.device)
    tile = choose_tile(packed_rows, problem.head_dim, kv_bytes, capability)
    shares = shares_of(problem, tile, triton.cdiv(packed_rows, tile.rows))
    if shares is None:
        described = all(loads_by_descriptor(cache, tile.keys) for cache in (problem.k_cache, problem.v_cache))
        tile = choose_prefill_tile(tile, problem.head_dim, kv_bytes, described, capability)
    q_blocks = triton.cdiv(packed_rows, tile.rows)
    partials = new_partials(shares, q_blocks, tile.rows, problem)
    pools = paired((problem.k_cache, problem.v_cache), tile)
    attention = TritonLaunch(
        _attention_kernel,
        (q_blocks, problem.num_kv_heads, problem.batch_size) if shares is None else (q_blocks, shares.count),
        problem.query,
        pools,
        tile_descriptor(problem.k_cache, tile, problem.head_dim),
        tile_descriptor(problem.v_cache, tile, problem.head_dim),
        (problem.k_block_tables, problem.v_block_tables),
        problem.seq_lens,
        problem.cu_seqlens_q,
        problem.sinks,
        problem.mask,
        problem.scales,
        results,
        partials,
        problem.max_q_len,
        problem.window_left,
        problem.batch_size,
        problem.num_kv_heads,
        0 if shares is None else shares.count,
        0 if shares is None else shares.least_tiles,
        Strides(
            problem.query.stride(0),
            problem.query.stride(1),
            PoolStrides(*pools[0].stride()[:3]),
            PoolStrides(*pools[1].stride()[:3]),
            problem.k_block_tables.stride(0),
            problem.v_block_tables.stride(0),
        ),
        GROUP=group,
        HEAD_DIM=problem.head_dim,
        PAGE_SIZE=problem.page_size,
        MASK_WORDS=0 if problem.mask is None else problem.mask.shape[2],
        CAUSAL=problem.causal,
        SHARED=shares is not None,
        TILE=tile,
        DOT_DTYPE=dot_dtype(problem.k_cache),
        OVERLAPS=partials is not None and overlaps_launches(problem.query.device),
        scratch=partials or (),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return with_merge(attention, partials, problem, q_blocks, results)
