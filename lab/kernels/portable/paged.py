"""FlashInfer's TRT-LLM attention functions over a paged cache in Triton: any NVIDIA GPU that Triton compiles for, and a CPU in
its interpreter.

Glossary:

* packed rows: the query rows of a request and the query heads that use one K/V head, packed into one matrix.
* block: the packed rows that one program computes together.
* unit: one request and one K/V head.
* share: the consecutive key tiles of the batch that one program reads (`lab.kernels.portable.key_shares`). A share may begin or
  end inside a unit.
* partial result: the attention of a unit over only some of its keys, with its LSE. A merge combines the partial results of a
  unit.
* kind: requests with few query tokens are the first kind, requests with more the second kind. Without this split all requests
  are of one kind.

One kernel serves decode, verify, draft extend and extend. K/V of a block is read once for all its packed rows. The keys of the
batch are divided into equal shares, one for each program. A second launch merges the partial results; of few rows the
last program does. One program reads all keys of a block only in a prefill, where query rows alone fill the GPU, and of a short
window. Lengths stay on the device: the host reads none, and no length is compiled in. On SM90, a Gluon kernel takes the calls
that are bound by matrix products (`lab.kernels.portable.hopper_attention`).

If each K/V head has its own page table and lengths, the work is divided as if every head of a request were a request of one
head. Only the query rows, and the unit that is merged, are still those of the real request.

In a batch of prompts and decodes, each kind has a launch with its own tile and division of the work. Programs of both launches
run at the same time:

    first launch, then its merge    requests with few tokens: shares of their keys, on half of the multiprocessors' capacity
    second launch                   other requests: blocks of rows or shares of keys, on the remaining capacity, later on all

If the second launch is the Gluon kernel's, or its programs need a whole multiprocessor, the first launch has the whole
capacity, and the second launch begins where programs of the first have ended. Latent attention (MLA) has a kernel of its own in
`mla_decode`, and its prefill before absorption has one in `ragged_context`.
"""

from collections.abc import Callable
from dataclasses import replace

import triton

from lab.calls import ContextCall, DecodeCall, takes
from lab.calls.arguments import following_scale
from lab.calls.problem import PagedAttention
from lab.gpus import capability_of
from lab.kernels.portable.hopper import hopper_launches, hopper_tiles
from lab.kernels.portable.kept_calls import kept_at_once
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

# A prefix is long if a request's rows see LONG_PREFIX keys or more per query row: its blocks then see about equally many keys.
LONG_PREFIX = 4
# The last program may merge, and a small batch may be cut into equal parts, if the tile has at most SMALL_ROWS rows. A part has
# at least SMALL_SHARE_KEYS keys: 64 keys more take a program about as long as one piece more takes the merge.
SMALL_ROWS = 32
SMALL_SHARE_KEYS = 128
# Most rows of all pieces of a unit, and elements of a piece, that the last program merges. One multiprocessor then reads them.
# On an H200, a launch for the merge, which has all multiprocessors, is slower up to 256 rows and faster from 512 on. The host
# does not know lengths: it estimates the pieces as if all requests had `max_kv_len` keys.
MOST_ROWS_AT_ONCE = 256
MOST_ELEMENTS_AT_ONCE = 32 * 128
# Most lengths (`num_lengths`) of a launch without shares, which has an index for each on the third axis of its grid.
MOST_LENGTHS = 65_535
# Most packed rows of a request of the first kind. A call with no more rows is bound by reading K/V (`choose_tile`).
MOST_FEW_ROWS = 64


@takes(DecodeCall)
def prepare_trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> TritonCall:
    """Prepare attention of each request's last query tokens over its paged K/V: decode, verify and draft extend.

    `lab.calls.DecodeCall` documents parameters, shapes, dtypes and errors. If the kernel does not support the call,
    NotImplementedError is raised with the reason of `lab.kernels.support.why_not`. On a GPU, lengths and page ids are not read:
    call `PagedAttention.check_values` to check them. Sums are in float32; `workspace_buffer` is not used.

    Returns:
        A function that runs the call and returns out [num_rows, num_qo_heads, head_dim]; with `return_lse` it returns (out,
        lse), lse in base 2.
    """
    problem = call.problem()
    if call.bmm1_scale_log2 is None:
        return _prepare(problem)
    # The problem's scale was made of the tensor's contents, which may change from call to call.
    scale, refresh = following_scale(call.bmm1_scale_log2)
    return _prepare(replace(problem, bmm1_scale=scale), refresh)


@takes(ContextCall)
def prepare_trtllm_batch_context_with_kv_cache(call: ContextCall) -> TritonCall:
    """Prepare attention of each request's newest tokens over its paged K/V: extend and prefill. Requests may differ in length.

    `lab.calls.ContextCall` documents parameters, shapes, dtypes and errors. Refusals, unread tensors and results are those of
    `prepare_trtllm_batch_decode_with_kv_cache`.
    """
    return _prepare(call.problem())


trtllm_batch_decode_with_kv_cache = kept_at_once(prepare_trtllm_batch_decode_with_kv_cache)
trtllm_batch_context_with_kv_cache = kept_at_once(prepare_trtllm_batch_context_with_kv_cache)


def _prepare(problem: PagedAttention, *refreshes: Callable[[], object]) -> TritonCall:
    return prepared(PORTABLE, problem, lambda *results: [*refreshes, *_launches(problem, results)])


def shares_of(
    problem: PagedAttention, tile: ProgramTile | HopperTile, q_blocks: int, of_kind: bool = False
) -> Shares | None:
    """Return how the keys are divided among programs; None if one program reads all keys of a block of rows and a K/V head.

    The division assumes that all blocks of a request see the same number of keys, which is nearly true for a long prefix.
    `of_kind` is True if the launch serves only requests with few query tokens, or only the other requests. `max_q_len` of the
    problem is then their largest number of query tokens.
    """
    may_be_undivided = of_kind or num_lengths(problem) <= MOST_LENGTHS
    has_few_rows, lanes = not of_kind and tile.rows <= SMALL_ROWS, 0
    if has_few_rows:
        if may_be_undivided and 0 <= problem.window_left <= CUT_KEYS.value - problem.max_q_len:
            return None  # a program reads so few keys sooner than it finds its share
        lanes = next((most for most in (WARP_REQUESTS.value, BLOCK_REQUESTS.value) if num_lengths(problem) <= most), 0)
    shares = choose_shares(tile, q_blocks, problem.query.device, SMALL_SHARE_KEYS if lanes else 0)
    if has_few_rows:
        shares = replace(shares, lanes=lanes, merges_at_once=merges_at_once(problem, tile, shares.count))
    longest = min(problem.batch_size, triton.cdiv(problem.num_rows, problem.max_q_len))
    blocks = q_blocks * problem.num_kv_heads * longest
    seen = problem.max_kv_len
    if problem.window_left >= 0:
        seen = min(seen, problem.window_left + problem.max_q_len)
    if may_be_undivided and seen < LONG_PREFIX * problem.max_q_len and blocks >= q_blocks * shares.count:
        return None
    return shares


def num_lengths(problem: PagedAttention) -> int:
    """Return the number of requests, times the K/V heads if each head has lengths of its own."""
    return problem.batch_size * (problem.num_kv_heads if problem.is_block_sparse else 1)


def merges_at_once(problem: PagedAttention, tile: ProgramTile | HopperTile, num_shares: int) -> bool:
    """Return True if merging partial results of few rows in a unit's last program is faster than in a second launch."""
    most_parts = num_shares // (problem.batch_size * problem.num_kv_heads)
    parts = min(most_parts, max(FEW_PARTS.value, triton.cdiv(problem.max_kv_len, 2 * SMALL_SHARE_KEYS)))
    rows = problem.max_q_len * problem.group
    is_one_block = rows <= tile.rows  # as `merge_if_last` takes it to be
    return is_one_block and parts * rows <= MOST_ROWS_AT_ONCE and tile.rows * problem.head_dim <= MOST_ELEMENTS_AT_ONCE


def few_tokens(problem: PagedAttention) -> int | None:
    """Return the largest number of query tokens per request for the first of two launches; None if one launch serves all.

    Two launches are worth their cost if a request may fill several blocks of rows. Lengths are on the device, so the host
    guesses: as many requests as possible have `max_q_len` rows, and the other requests have equal parts of the remaining rows.
    The first launch serves a request if its rows fit the tile for that equal number. A wrong guess costs only time, because
    exactly one launch serves each request.
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


def shares_beside(problem: PagedAttention, shares: Shares, prefill: ProgramTile | HopperTile) -> Shares:
    """Return `shares` with fewer programs, at least half of them, so that programs of the second launch run at the same time.

    A multiprocessor with a program of each launch reads keys for one while it multiplies for the other. If a program of the
    second launch, of tile `prefill`, needs a whole multiprocessor, it cannot run before the first launch ends, and `shares` is
    returned unchanged. So it is if the second launch is the Gluon kernel's: fewer programs of the first launch made batches 4
    to 8 % slower.
    """
    if prefill.per_multiprocessor == 1 or isinstance(prefill, HopperTile):
        return shares
    packed_rows = problem.num_rows * problem.group
    programs = triton.cdiv(packed_rows, prefill.rows) * problem.num_kv_heads
    return replace(shares, count=max(1, shares.count // 2, shares.count - programs))


def _tile(problem: PagedAttention, q_len: int) -> ProgramTile:
    """Return the Triton kernel's tile for shares, with at most `q_len` query tokens per request."""
    kv_bytes, capability = problem.k_cache.element_size(), capability_of(problem.query.device)
    return choose_tile(q_len * problem.group, problem.head_dim, kv_bytes, capability)


def _tile_and_shares(problem: PagedAttention, of_kind: bool) -> tuple[ProgramTile | HopperTile, Shares | None]:
    packed_rows = problem.max_q_len * problem.group
    hopper = hopper_tiles(problem)
    if hopper is not None:
        # One block of rows is bound by reading K/V, several by their products.
        shared = hopper.shares if packed_rows <= hopper.shares.rows else hopper.blocks
        shares = shares_of(problem, shared, triton.cdiv(packed_rows, shared.rows))
        blocks = hopper.windows if 0 <= problem.window_left < hopper.few_keys else hopper.blocks
        return blocks if shares is None else shared, shares
    tile = _tile(problem, problem.max_q_len)
    shares = shares_of(problem, tile, triton.cdiv(packed_rows, tile.rows), of_kind)
    if shares is not None:
        return tile, shares
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
        first_shares = shares_beside(problem, first_shares, tile)
    attention, *merge = _launches_of(first, results, first_tile, first_shares, 1)
    second_attention, *second_merge = _launches_of(problem, results, tile, shares, few + 1)
    return [attention, second_attention, *merge, *second_merge]


def _grid(
    problem: PagedAttention, q_blocks: int, tile: ProgramTile, shares: Shares | None, least_q_len: int | None
) -> tuple[int, ...]:
    """Return the grid of a launch of the Triton kernel: (blocks of rows, shares), or a program for each block and K/V head.

    If the launch serves only requests of `least_q_len` or more tokens, the grid covers the most blocks that they can have.
    """
    if shares is not None:
        return q_blocks, shares.count
    if least_q_len is None:
        lengths = num_lengths(problem)
        return q_blocks, problem.batch_size * problem.num_kv_heads // lengths, lengths
    return most_blocks(problem, tile.rows, least_q_len), problem.num_kv_heads


def _launches_of(
    problem: PagedAttention,
    results: Results,
    tile: ProgramTile | HopperTile,
    shares: Shares | None,
    least_q_len: int | None = None,
) -> list[TritonLaunch]:
    """Return the launches for the requests of `least_q_len` to `problem.max_q_len` query tokens: attention, perhaps a merge.

    `least_q_len` is None if the launches serve all requests, 1 in the first of two launches, and larger in the second.
    """
    if isinstance(tile, HopperTile):
        return hopper_launches(problem, results, tile, shares, least_q_len)
    q_blocks = triton.cdiv(problem.max_q_len * problem.group, tile.rows)
    partials = new_partials(shares, q_blocks, tile.rows, problem)
    pools = paired((problem.k_cache, problem.v_cache), tile)
    overlaps = overlaps_launches(problem.query.device)
    overlapped = overlaps and least_q_len is not None and least_q_len > 1
    at_once = merged_at_once(problem, shares.count) if shares is not None and shares.merges_at_once else None
    scratch, counters = (partials[:2], partials[2:]) if partials and at_once else (partials or (), ())
    attention = TritonLaunch(
        _attention_kernel,
        _grid(problem, q_blocks, tile, shares, least_q_len),
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
        least_q_len,
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
            problem.k_block_tables.stride(-2),
            problem.v_block_tables.stride(-2),
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
