"""FlashInfer's TRT-LLM attention functions over a paged cache in Triton: any NVIDIA GPU that Triton compiles for, and a CPU in
its interpreter.

The query rows of a request and the query heads that use one K/V head are *packed* into one matrix, and a *block* is the packed
rows that one program computes together. `lab.kernels.portable.key_shares` explains unit, share, partial result and kind.

One kernel serves decode, verify, draft extend and extend. A program reads K/V once for all packed rows of a block. The keys of
the batch are divided into equal shares, one for each program. A second launch merges the partial results; if there are few
rows, the last program merges them. One program reads all keys of a block only in a prefill, whose query rows fill the GPU, and
if the call's largest length or its window is short. The host reads no length of a request, and no length is compiled in. On
SM90, a Gluon kernel serves the calls that are bound by matrix products (`lab.kernels.portable.hopper_attention`). If each K/V
head has its own page table and lengths, each is treated as a request of its own.

In a batch of prompts and decodes, requests with few query tokens are of one kind and those with more of another. Each kind has
a launch with its own tile and division of the work, and programs of both launches run at the same time:

    first launch, then its merge    requests with few tokens: shares of their keys, on half of the multiprocessors' capacity
    second launch                   other requests: blocks of rows or shares of keys, on the remaining capacity, later on all

If the second launch is the Gluon kernel's, or its programs need a whole multiprocessor, the first launch has the whole
capacity, and programs of the second launch begin as programs of the first end.
"""

from collections.abc import Callable
from dataclasses import replace

import triton

from lab.calls import ContextCall, DecodeCall, takes
from lab.calls.arguments import following_scale
from lab.calls.problem import PagedAttention
from lab.gpus import capability_of
from lab.kernels.portable.hopper import hopper_launches, hopper_tiles
from lab.kernels.portable.key_shares import BLOCK_REQUESTS, CUT_KEYS, FEW_PARTS, WARP_REQUESTS, Shares, choose_shares
from lab.kernels.portable.merge import merged_at_once, with_merge
from lab.kernels.portable.paged_kernel import Strides, _attention_kernel
from lab.kernels.portable.partial_results import Results, new_partials, overlaps_launches
from lab.kernels.portable.rows import most_blocks
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

# A prefix is long if a request has at least LONG_PREFIX keys per query row: its blocks then see about equally many keys.
LONG_PREFIX = 4
# The last program may merge, and a small batch may be cut into equal parts, if the tile has at most SMALL_ROWS rows. A part has
# at least SMALL_SHARE_KEYS keys: a program reads 64 keys in about the time that the merge needs for one partial result.
SMALL_ROWS = 32
SMALL_SHARE_KEYS = 128
# Largest number of rows of all partial results of a unit, and of elements of one, that the last program merges, on one
# multiprocessor. On an H200 a launch for the merge, on all multiprocessors, is slower up to 256 rows and faster from 512 on.
# The number of partial results is estimated as if all requests had `max_kv_len` keys.
MOST_ROWS_AT_ONCE = 256
MOST_ELEMENTS_AT_ONCE = 32 * 128
MOST_LENGTHS = 65_535  # largest `num_lengths` of a launch without shares: the limit of the grid's third axis
MOST_FEW_ROWS = 64  # packed rows of a request of the first kind, which is bound by reading K/V (`choose_tile`)


@takes(DecodeCall)
def prepare_trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> TritonCall:
    """Return a prepared call: attention of each request's last query tokens over its paged K/V (decode, verify, draft extend).

    `lab.calls.DecodeCall` documents parameters, shapes, dtypes and errors. Raises NotImplementedError with the reason if the
    kernel does not support the call (`lab.kernels.support.why_not`). On a GPU, lengths and page ids are not read: call
    `PagedAttention.check_values` to check them. Sums are in float32; `workspace_buffer` is not used. A run returns out
    [num_rows, num_qo_heads, head_dim]; with `return_lse` (out, lse), lse in base 2.
    """
    problem = call.problem()
    if call.bmm1_scale_log2 is None:
        return _prepare(problem)
    # The scale in the problem was read from the tensor, whose contents may change from run to run.
    scale, refresh = following_scale(call.bmm1_scale_log2)
    return _prepare(replace(problem, bmm1_scale=scale), refresh)


@takes(ContextCall)
def prepare_trtllm_batch_context_with_kv_cache(call: ContextCall) -> TritonCall:
    """Return a prepared call: attention of each request's newest tokens over its paged K/V (extend, prefill).
    `lab.calls.ContextCall` documents shapes and errors. On a GPU, lengths and page ids are not checked. A run returns out
    [num_rows, num_qo_heads, head_dim]; with `return_lse` (out, lse), lse in base 2.
    """
    return _prepare(call.problem())


def _prepare(problem: PagedAttention, *refreshes: Callable[[], object]) -> TritonCall:
    return prepared(PORTABLE, problem, lambda *results: [*refreshes, *_launches(problem, results)])


def shares_of(
    problem: PagedAttention, tile: ProgramTile | HopperTile, q_blocks: int, of_kind: bool = False
) -> Shares | None:
    """Return how the keys are divided among programs; None if one program reads all keys of a block of rows and a K/V head.

    The division assumes that all blocks of a request see the same number of keys, which is nearly true for a long prefix. If
    `of_kind`, the launch serves only requests with at most `problem.max_q_len` query tokens, such as the decodes of a mixed
    batch.
    """
    may_be_undivided = of_kind or num_lengths(problem) <= MOST_LENGTHS
    seen = problem.max_kv_len
    if problem.window_left >= 0:
        seen = min(seen, problem.window_left + problem.max_q_len)
    is_small = not of_kind and isinstance(tile, ProgramTile) and tile.rows <= MOST_FEW_ROWS
    if may_be_undivided and is_small and seen <= CUT_KEYS.value:
        return None  # one program reads these few keys in less time than several need to divide and to merge them
    has_few_rows, lanes = not of_kind and tile.rows <= SMALL_ROWS, 0
    if has_few_rows:
        lanes = next((most for most in (WARP_REQUESTS.value, BLOCK_REQUESTS.value) if num_lengths(problem) <= most), 0)
    shares = choose_shares(tile, q_blocks, problem.query.device, SMALL_SHARE_KEYS if lanes else 0)
    if has_few_rows:
        shares = replace(shares, lanes=lanes, merges_at_once=merges_at_once(problem, tile, shares.count))
    longest = min(problem.batch_size, triton.cdiv(problem.num_rows, problem.max_q_len))
    blocks = q_blocks * problem.num_kv_heads * longest
    if may_be_undivided and seen < LONG_PREFIX * problem.max_q_len and blocks >= q_blocks * shares.count:
        return None
    return shares


def num_lengths(problem: PagedAttention) -> int:
    """Return the number of lengths in `seq_lens`: one per request, or per request and K/V head in block-sparse attention."""
    return problem.batch_size * (problem.num_kv_heads if problem.is_block_sparse else 1)


def merges_at_once(problem: PagedAttention, tile: ProgramTile | HopperTile, num_shares: int) -> bool:
    """Return True if the last program of a request and K/V head should merge the partial results, not a second launch."""
    most_parts = num_shares // (problem.batch_size * problem.num_kv_heads)
    parts = min(most_parts, max(FEW_PARTS.value, triton.cdiv(problem.max_kv_len, 2 * SMALL_SHARE_KEYS)))
    rows = problem.max_q_len * problem.group
    is_one_block = rows <= tile.rows  # `merge_if_last` requires it
    return is_one_block and parts * rows <= MOST_ROWS_AT_ONCE and tile.rows * problem.head_dim <= MOST_ELEMENTS_AT_ONCE


def few_tokens(problem: PagedAttention) -> int | None:
    """Return n if a first launch should serve requests of at most n query tokens, and a second the others; None: one launch.

    Two launches are worth their cost if a request may fill several blocks of rows. The host knows only the total number of
    query tokens and `max_q_len`. It guesses that as many requests as possible have `max_q_len` tokens, and that the other
    requests have equal numbers. A wrong guess costs only time.
    """
    longest, rest = divmod(problem.num_rows, problem.max_q_len)
    others = problem.batch_size - longest
    has_one_kind = problem.cu_seqlens_q is None or problem.mask is not None or problem.is_block_sparse
    if has_one_kind or problem.batch_size == 1 or others <= 0:
        return None
    if problem.max_q_len * problem.group <= _tile(problem, problem.max_q_len).rows:
        return None
    mean = max(1, triton.cdiv(rest, others))
    few = max(1, _tile(problem, min(mean, MOST_FEW_ROWS // problem.group)).rows // problem.group)
    return few if few < problem.max_q_len else None


def shares_of_first(problem: PagedAttention, shares: Shares, prefill: ProgramTile | HopperTile) -> Shares:
    """Return `shares` with a smaller `count` (at least half) for the first of two launches. Programs of both launches then run
    at the same time: a multiprocessor reads keys for one launch while it multiplies for the other.

    Return `shares` unchanged if a program of the second launch (tile `prefill`) needs a whole multiprocessor, or if the second
    launch is the Gluon kernel's, with which fewer programs made batches 4 to 8 % slower.
    """
    if prefill.per_multiprocessor == 1 or isinstance(prefill, HopperTile):
        return shares
    packed_rows = problem.num_rows * problem.group
    programs = triton.cdiv(packed_rows, prefill.rows) * problem.num_kv_heads
    return replace(shares, count=max(1, shares.count // 2, shares.count - programs))


def _tile(problem: PagedAttention, q_len: int) -> ProgramTile:
    kv_bytes, capability = problem.k_cache.element_size(), capability_of(problem.query.device)
    return choose_tile(q_len * problem.group, problem.head_dim, kv_bytes, capability)


def _tile_and_shares(problem: PagedAttention, of_kind: bool) -> tuple[ProgramTile | HopperTile, Shares | None]:
    packed_rows = problem.max_q_len * problem.group
    hopper = hopper_tiles(problem)
    if hopper is not None:
        # A request of one block is bound by reading K/V, a request of several blocks by its products.
        shared = hopper.shares if packed_rows <= hopper.shares.rows else hopper.blocks
        shares = shares_of(problem, shared, triton.cdiv(packed_rows, shared.rows))
        blocks = hopper.windows if 0 <= problem.window_left < hopper.few_keys else hopper.blocks
        return blocks if shares is None else shared, shares
    tile = _tile(problem, problem.max_q_len)
    shares = shares_of(problem, tile, triton.cdiv(packed_rows, tile.rows), of_kind)
    if shares is not None:
        return tile, shares
    runs_at_once = problem.batch_size * problem.num_kv_heads <= choose_shares(tile, 1, problem.query.device).count
    if tile.rows <= SMALL_ROWS and runs_at_once and problem.window_left < 0:
        return tile, None  # smaller tiles would not let more programs run; in windows they were faster
    described = all(loads_by_descriptor(cache, tile.keys) for cache in (problem.k_cache, problem.v_cache))
    kv_bytes, capability = problem.k_cache.element_size(), capability_of(problem.query.device)
    return choose_prefill_tile(tile, problem.head_dim, kv_bytes, described, capability), None


def _launches(problem: PagedAttention, results: Results) -> list[TritonLaunch]:
    few = few_tokens(problem)
    tile, shares = _tile_and_shares(problem, few is not None)
    if few is None:
        return _launches_of(problem, results, tile, shares)
    first = replace(problem, max_q_len=few)
    first_tile, first_shares = _tile_and_shares(first, True)
    if first_shares is not None and shares is None and overlaps_launches(problem.query.device):
        first_shares = shares_of_first(problem, first_shares, tile)
    attention, *merge = _launches_of(first, results, first_tile, first_shares, 1)
    second_attention, *second_merge = _launches_of(problem, results, tile, shares, few + 1)
    return [attention, second_attention, *merge, *second_merge]


def _launches_of(
    problem: PagedAttention,
    results: Results,
    tile: ProgramTile | HopperTile,
    shares: Shares | None,
    least_q_len: int | None = None,
) -> list[TritonLaunch]:
    """Return the launch for requests of `least_q_len` to `max_q_len` query tokens and, if programs divide keys, a merge."""
    if isinstance(tile, HopperTile):
        return hopper_launches(problem, results, tile, shares, least_q_len)
    q_blocks = triton.cdiv(problem.max_q_len * problem.group, tile.rows)
    partials = new_partials(shares, q_blocks, tile.rows, problem)
    if shares is not None:
        grid: tuple[int, ...] = (q_blocks, shares.count)
    elif least_q_len is None:
        lengths = num_lengths(problem)
        grid = (q_blocks, problem.batch_size * problem.num_kv_heads // lengths, lengths)
    else:
        grid = (most_blocks(problem, tile.rows, least_q_len), problem.num_kv_heads)
    pools = paired((problem.k_cache, problem.v_cache), tile)
    overlaps = overlaps_launches(problem.query.device)
    overlapped = overlaps and least_q_len is not None and least_q_len > 1
    at_once = merged_at_once(problem, shares.count) if shares is not None and shares.merges_at_once else None
    scratch, counters = (partials[:2], partials[2:]) if partials and at_once else (partials or (), ())
    attention = TritonLaunch(
        _attention_kernel,
        grid,
        problem.query,
        pools,
        tile_descriptor(problem.k_cache, tile, problem.head_dim),
        tile_descriptor(problem.v_cache, tile, problem.head_dim),
        problem.k_block_tables,
        problem.v_block_tables,
        problem.seq_lens,
        problem.cu_seqlens_q,
        problem.sinks,
        problem.mask,
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
        problem.k_block_tables.stride(-2),
        problem.v_block_tables.stride(-2),
        Strides(
            problem.query.stride(0),
            problem.query.stride(1),
            PoolStrides(*pools[0].stride()[:3]),
            PoolStrides(*pools[1].stride()[:3]),
        ),
        GROUP=problem.group,
        HEAD_DIM=problem.head_dim,
        PAGE_SIZE=problem.page_size,
        MASK_WORDS=0 if problem.mask is None else problem.mask.shape[2],
        CAUSAL=problem.causal,
        BY_HEAD=problem.is_block_sparse,
        SHARED=shares is not None,
        LANES=0 if shares is None else shares.lanes,
        MERGED=at_once,
        TILE=tile,
        DOT_DTYPE=dot_dtype(problem.k_cache),
        OVERLAPS=overlaps and not at_once and (partials is not None or least_q_len is not None),
        OVERLAPPED=overlapped,
        scratch=scratch,
        counters=counters,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=overlapped,
    )
    return [attention] if at_once else with_merge(attention, partials, problem, q_blocks, results, least_q_len)
