"""Merge the partial results of attention for each unit (one request and one K/V head) into the output.

A piece is one partial result: the attention of a unit over the keys of one share. A second launch merges the pieces. If units
have few rows, the program that stores the last piece of a unit merges them instead (`paged.merges_at_once`):

    pieces of a unit     0   1  ..  15     16  ..  31     32 33          a program each; none waits for another
                         |___|_______|     |________|     |__|
    counters               group 0          group 1      group 2         the last program of a group merges the group
                              |________________|____________|
    counter                                unit                          the last of these merges the groups into the output

Pieces are merged in the order of their shares, whichever program merges, so that every call gives the same bits. A merge runs
once, so its time grows with its number of instructions (results/nvidia-h200/kernels.md, "A merge is as long as its code").
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lab.calls.problem import PagedAttention
from lab.kernels.portable.key_shares import BLOCK_REQUESTS
from lab.kernels.portable.partial_results import (
    GROUPED_PIECES,
    PartialResults,
    Results,
    overlaps_launches,
    rows_of_unit,
    slot_of,
    store_share,
)
from lab.kernels.portable.rows import block_at, most_blocks, request_rows
from lab.kernels.portable.triton_call import TritonLaunch

MERGED_AT_A_TIME = 2048  # elements of partial results that a program of the merge launch reads at a time
MERGE_WARPS = 4
# Largest number of rows of such a program, and number of programs that fill a GPU: eight on each of 132 multiprocessors.
MOST_MERGED_ROWS = 16
MERGE_PROGRAMS = 1024
# Largest number of idle programs per program with rows, in a grid over all possible rows. Above it, each program searches for
# its rows, which takes several times as long as an idle program.
MOST_IDLE = 4
ELEMENTS_AT_ONCE = 16384  # of pieces that the last program of a unit reads at a time, 128 per thread


def with_merge(
    attention: TritonLaunch,
    partials: PartialResults | None,
    problem: PagedAttention,
    q_blocks: int,
    results: Results,
    least_q_len: int | None = None,
) -> list[TritonLaunch]:
    """Return a list of `attention` and, if there are partial results, a launch that merges them."""
    if partials is None:
        return [attention]
    units, packed_rows = problem.batch_size * problem.num_kv_heads, problem.max_q_len * problem.group
    rows, dims, lanes = merge_block(units * packed_rows, problem.v_head_dim)
    row_blocks = triton.cdiv(packed_rows, rows)
    blocks = most_blocks(problem, rows, least_q_len)
    finds_rows = problem.cu_seqlens_q is not None and problem.batch_size * row_blocks >= (1 + MOST_IDLE) * blocks
    grid = (blocks, problem.num_kv_heads) if finds_rows else (units, row_blocks)
    overlaps = overlaps_launches(problem.query.device)
    merge = TritonLaunch(
        merge_kernel,
        (*grid, problem.v_head_dim // dims),
        partials,
        problem.cu_seqlens_q,
        problem.sinks,
        problem.bmm2_scale,
        results,
        least_q_len,
        problem.max_q_len,
        q_blocks,
        problem.batch_size if finds_rows else None,
        problem.num_kv_heads,
        GROUP=problem.group,
        HEAD_DIM=problem.v_head_dim,
        BLOCK_ROWS=partials.out.shape[1],
        MERGED_ROWS=rows,
        MERGED_DIMS=dims,
        LANES=lanes,
        AT_A_TIME=max(2, MERGED_AT_A_TIME // (rows * dims)),
        OVERLAPS=overlaps,
        scratch=partials,
        num_warps=MERGE_WARPS,
        launch_pdl=overlaps,
    )
    return [attention, merge]


def merge_block(num_rows: int, head_dim: int) -> tuple[int, int, int]:
    """Return the tile of one program of the merge launch: (rows, elements of head_dim, lanes). In a call with few rows, groups
    of threads (lanes) divide the many partial results. In a call with many rows a program has several rows, with 4 or 16
    elements per thread.
    """
    elements = num_rows * head_dim // MERGE_PROGRAMS
    if elements < 256:
        dims = min(head_dim, 32)
        return 1, dims, MERGED_AT_A_TIME // dims
    sums = 512 if elements < MERGED_AT_A_TIME else MERGED_AT_A_TIME
    dims = min(head_dim, sums // 4)
    return min(MOST_MERGED_ROWS, sums // dims), dims, 1


def merged_at_once(problem: PagedAttention, num_shares: int) -> tuple[int, int]:
    """Return `merge_if_last`'s argument MERGED: (max_q_len * GROUP, or the next power of 2; partial results read at once)."""
    rows = triton.next_power_of_2(problem.max_q_len * problem.group)
    most_parts = num_shares // (problem.batch_size * problem.num_kv_heads)
    pieces = min(GROUPED_PIECES.value, ELEMENTS_AT_ONCE // (rows * problem.head_dim))
    return rows, max(1, min(pieces, triton.next_power_of_2(most_parts)))


# Inlined, it would compile more slowly (results/nvidia-h200/kernels.md, "The merge is a function").
@triton.jit(noinline=True)
def merge_if_last(
    unit,  # (index of the request and K/V head, K/V head, number of K/V heads, first row of the request, its number of rows)
    cut,  # (place of the unit's first tile, number of its tiles, this share, places of a share, number of shares): `key_shares`
    sinks,
    bmm2_scale,
    results,  # (out, lse_log2 or None)
    partials,  # `PartialResults`
    GROUP: tl.constexpr,  # query heads per K/V head
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # rows of a partial result in `partials`
    MERGED: tl.constexpr,  # result of `merged_at_once`
):
    """Merge the partial results of one request and K/V head into the output if this program has stored the last of them."""
    first_place, tiles, share, share_places, num_shares = cut
    number, kv_head, num_kv_heads, q_start, q_len = unit
    merged_row = tl.arange(0, MERGED[0])
    row_head, head, row_exists = rows_of_unit(merged_row, q_start, q_len, kv_head, num_kv_heads, GROUP)
    dims = tl.arange(0, HEAD_DIM)
    to_share = (share * share_places - first_place).to(tl.int32)  # so that the divisions are of 32 bits
    first = share - tl.cdiv(to_share, share_places.to(tl.int32))
    last = share + (tiles - 1 - to_share).to(tl.int32) // share_places.to(tl.int32)
    group = (share - first) // GROUPED_PIECES
    begin = first + group * GROUPED_PIECES
    end = tl.minimum(begin + GROUPED_PIECES, last + 1)
    num_groups = tl.cdiv(last - first + 1, GROUPED_PIECES)
    counters = partials.of_units + number * (1 + tl.cdiv(num_shares, GROUPED_PIECES))
    block_rows = (merged_row, row_exists)
    whole_rows = (row_head, head, row_exists, row_head)
    step = 1
    goes_on = arrives_last(counters + 1 + group, end - begin)
    while goes_on:  # the first turn merges the pieces of a group, the second the groups, with the same code
        state = merged((first, begin, end, step), (0, 1), block_rows, dims, partials, BLOCK_ROWS, HEAD_DIM, MERGED[1])
        goes_on = (step == 1) & (num_groups > 1)
        if goes_on:  # store the group's result in the slot of its first piece, which all threads have read
            tl.debug_barrier()
            row = slot_of(begin, 0, 1, begin == first) * BLOCK_ROWS + merged_row
            store_share(state, (row_head, head, row_exists, row), dims, False, sinks, bmm2_scale, results, partials)
            begin, end, step = first, last + 1, GROUPED_PIECES
            goes_on = arrives_last(counters, num_groups)
        else:
            store_share(state, whole_rows, dims, True, sinks, bmm2_scale, results, None)


@triton.jit
def arrives_last(counter, expected):
    """Add 1 to `counter`, int32. Return True in the last of `expected` programs that do so. This program sets the counter to 0.

    After the call, the last program can read what all programs stored before their calls, by PTX's memory model ("Causality
    Order"). The first barrier of a program orders the stores of its threads before its atomic addition, which one thread makes
    and which releases these stores to the GPU. The last addition acquires what all earlier additions to the counter released,
    and invalidates the L1 of its multiprocessor. The second barrier orders the addition before later loads of all threads.
    The reset needs no atomic: the next addition is made in the next launch, which begins only after this launch has ended.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    tl.debug_barrier()
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def with_piece(largest, denominator, sums, lse, part):
    """Return a softmax's (largest, denominator, sums) after adding a partial result: output `part`, LSE `lse` in base 2."""
    new_largest = tl.maximum(largest, lse)
    origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weight = tl.exp2(lse - origin)
    rescale = tl.exp2(largest - origin)
    denominator = denominator * rescale + weight
    sums = sums * tl.expand_dims(rescale, -1) + part * tl.expand_dims(weight, -1)
    return new_largest, denominator, sums


@triton.jit
def merged(
    pieces,  # indices of shares: (first with keys of the request and K/V head, first to merge, end of those to merge, step)
    block,  # (index of the block of rows in the request, number of such blocks of a request)
    rows,  # (index of the row in its block, True where the row exists)
    dims,  # indices of the elements of an output row that are merged
    partials,  # `PartialResults`
    BLOCK_ROWS: tl.constexpr,  # rows of a partial result in `partials`
    ROW_DIMS: tl.constexpr,  # elements of an output row
    AT_A_TIME: tl.constexpr,  # partial results that are read before they are added up
):
    """Merge partial results of a request and K/V head, one per `step` shares. Return a softmax (largest, denominator, sums)."""
    first, begin, end, step = pieces
    block_row, row_exists = rows
    ROWS: tl.constexpr = block_row.shape[0]
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, dims.shape[0]], tl.float32)
    for start in range(begin, end, AT_A_TIME * step):
        # A thread adds up its own elements: no warp waits for another, and loads of AT_A_TIME pieces are in flight together.
        for number in tl.static_range(AT_A_TIME):
            share = start + number * step
            exists = row_exists & (share < end)
            row = slot_of(share, block[0], block[1], share == first) * BLOCK_ROWS + block_row
            lse = tl.load(partials.lse_log2 + row, mask=exists, other=float("-inf"))
            part = tl.load(partials.out + row[:, None] * ROW_DIMS + dims[None, :], mask=exists[:, None], other=0.0)
            largest, denominator, sums = with_piece(largest, denominator, sums, lse, part)
    return largest, denominator, sums


@triton.jit
def merged_by_lanes(
    pieces, block, rows, dims, partials, BLOCK_ROWS: tl.constexpr, ROW_DIMS: tl.constexpr, LANES: tl.constexpr
):
    """Return what `merged` returns, from the same arguments. LANES groups of threads divide the partial results among them."""
    first, begin, end, step = pieces
    block_row, row_exists = rows
    ROWS: tl.constexpr = block_row.shape[0]
    lane = tl.arange(0, LANES)
    largest = tl.full([LANES, ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([LANES, ROWS], tl.float32)
    sums = tl.zeros([LANES, ROWS, dims.shape[0]], tl.float32)
    for start in range(begin, end, LANES * step):
        share = start + lane * step
        exists = (share < end)[:, None] & row_exists[None, :]
        row = slot_of(share, block[0], block[1], share == first)[:, None] * BLOCK_ROWS + block_row[None, :]
        lse = tl.load(partials.lse_log2 + row, mask=exists, other=float("-inf"))
        elements = partials.out + row[:, :, None] * ROW_DIMS + dims[None, None, :]
        part = tl.load(elements, mask=exists[:, :, None], other=0.0)
        largest, denominator, sums = with_piece(largest, denominator, sums, lse, part)
    most = tl.max(largest, 0)
    rescale = tl.exp2(largest - tl.where(most == float("-inf"), 0.0, most)[None, :])
    return most, tl.sum(denominator * rescale, 0), tl.sum(sums * rescale[:, :, None], 0)


@triton.jit(do_not_specialize=["least_q_len", "max_q_len", "q_blocks", "batch_size", "num_kv_heads"])
def merge_kernel(
    partials,  # `PartialResults`
    cu_seqlens_q,  # None: every request has max_q_len rows
    sinks,  # None: no sink
    bmm2_scale,  # a number or a pointer
    results,  # (out, lse_log2 or None)
    least_q_len,  # None: the launch is for all requests; else for those of `least_q_len` to `max_q_len` rows
    max_q_len,
    q_blocks,  # blocks of rows of a request in the attention launch
    batch_size,  # None: the grid is (requests * K/V heads, blocks of a request, ...); else (all blocks, K/V heads, ...)
    num_kv_heads,
    GROUP: tl.constexpr,  # query heads per K/V head
    HEAD_DIM: tl.constexpr,  # elements of an output row
    BLOCK_ROWS: tl.constexpr,  # rows of a partial result in `partials`
    MERGED_ROWS: tl.constexpr,  # rows of one program
    MERGED_DIMS: tl.constexpr,  # elements of each row that one program merges
    LANES: tl.constexpr,  # 1: `merged`; more: `merged_by_lanes`
    AT_A_TIME: tl.constexpr,  # as in `merged`
    OVERLAPS: tl.constexpr,  # True: this launch may begin before the attention launch ends
):
    """Merge the partial results of some rows of one request and K/V head, each weighted by 2 ** LSE, and add the sink once."""
    if OVERLAPS:  # in every program, because the next launch waits only for this one
        gdc_wait()
    unit = tl.program_id(0)
    if batch_size is not None:
        kind = (cu_seqlens_q, least_q_len, max_q_len)
        lanes = tl.arange(0, BLOCK_REQUESTS)
        found, first_block, _, _ = block_at(unit, batch_size, kind, lanes, GROUP, MERGED_ROWS)
        if found >= batch_size:
            return
        row_block = unit - first_block
        unit = found * num_kv_heads + tl.program_id(1)
    first_share = tl.load(partials.of_units + unit * 2).to(tl.int64)
    last_share = tl.load(partials.of_units + unit * 2 + 1).to(tl.int64)
    if first_share == last_share:  # one program has read all keys, and has written the output
        return
    request = (unit // num_kv_heads).to(tl.int64)
    q_start, q_len = request_rows(cu_seqlens_q, request, max_q_len)
    if least_q_len is not None and (q_len < least_q_len) | (q_len > max_q_len):  # another launch merges it
        return
    first_packed = (tl.program_id(1) if batch_size is None else row_block) * MERGED_ROWS
    if first_packed >= q_len * GROUP:
        return
    packed = first_packed + tl.arange(0, MERGED_ROWS)
    kv_head = unit % num_kv_heads
    row_head, head, row_exists = rows_of_unit(packed, q_start, q_len, kv_head, num_kv_heads, GROUP)
    dims = tl.program_id(2) * MERGED_DIMS + tl.arange(0, MERGED_DIMS)
    pieces = (first_share, first_share, last_share + 1, 1)
    block = (first_packed // BLOCK_ROWS, q_blocks)
    rows = (packed % BLOCK_ROWS, row_exists)
    if LANES == 1:
        state = merged(pieces, block, rows, dims, partials, BLOCK_ROWS, HEAD_DIM, AT_A_TIME)
    else:
        state = merged_by_lanes(pieces, block, rows, dims, partials, BLOCK_ROWS, HEAD_DIM, LANES)
    written = (row_head, head, row_exists, row_head)
    store_share(state, written, dims, True, sinks, bmm2_scale, results, None, HEAD_DIM)
