"""Partial results of units that several shares hold (`lab.kernels.portable.key_shares`), and their merge.

A piece is what one share has of a unit. A second launch merges pieces. In a small batch whose units have few pieces of few
rows, the last program that stores a piece of a unit merges them instead:

    pieces of a unit     0   1  ..  15     16  ..  31     32 33          a program each; none waits for another
                         |___|_______|     |________|     |__|
    counters               group 0          group 1      group 2         the last to arrive at one merges the group,
                              |________________|____________|
    counter                                unit                          the last of those merges the groups: the output

Pieces are merged in their own order, whoever arrives last, so that the bits of a result repeat.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lab.calls.problem import PagedAttention
from lab.gpus import capability_of, family_of
from lab.kernels.portable.key_shares import BLOCK_REQUESTS, Shares
from lab.kernels.portable.rows import block_at, most_blocks, request_rows
from lab.kernels.portable.softmax import LOG2_E, log2_sum, rounded, scalar, store_rows
from lab.kernels.portable.triton_call import TritonLaunch, new_scratch

# A program of the merge has so many sums, 16 a thread, and reads so many partial results at a time for each.
MERGED_SUMS = 2048
MERGED_AT_A_TIME: tl.constexpr = tl.constexpr(4)
MERGE_WARPS = 4
LSES_AT_A_TIME: tl.constexpr = tl.constexpr(64)
# Most rows of such a program, and programs that fill a GPU: eight on each of 132 multiprocessors.
MOST_MERGED_ROWS = 16
MERGE_PROGRAMS = 1024
# Programs that have nothing to do for each that finds its rows: finding them costs several times what such a program does.
MOST_IDLE = 4
# Pieces of a group, where the last program merges.
GROUPED_PIECES: tl.constexpr = tl.constexpr(16)


Results = tuple[torch.Tensor, torch.Tensor | None]  # a call's output, and its LSE in base 2 unless nobody wants it


class PartialResults(NamedTuple):
    """Two slots per program: normalised results of the keys that it had, so that a merge needs only their log-sum-exp.

    Attributes:
        out: float32 [q_blocks * shares * 2, rows, v_head_dim].
        lse_log2: float32 [q_blocks * shares * 2, rows]; -inf where a row sees none of the keys.
        of_units: int32. For a merge that is a launch, [batch_size * num_kv_heads, 2]: the first and the last share that have
            keys of a unit. For one by the last program, counters [batch_size * num_kv_heads, q_blocks, 1 + groups]: how many
            programs have arrived at a block of a unit's rows and at its groups of pieces, zero between launches.
    """

    out: torch.Tensor
    lse_log2: torch.Tensor
    of_units: torch.Tensor


def new_partials(shares: Shares | None, q_blocks: int, rows: int, problem: PagedAttention) -> PartialResults | None:
    """Allocate the partial results of a call whose requests have `q_blocks` blocks of `rows` rows; None if no unit is cut.

    Counters belong to a call, as its slots do, and are filled with zeros here: once for a prepared call, and inside the graph
    for one that a graph captures whole. Each launch leaves them zero. So neither a replay nor a call on another stream can meet
    counters that are in use. A workspace of the caller's would not do: it may be shared by streams, and trtllm-gen writes into
    all of it (`lab.calls.workspace`).
    """
    if shares is None or shares.count == 1:
        return None
    device, slots = problem.query.device, 2 * q_blocks * shares.count
    units = problem.batch_size * problem.num_kv_heads
    parts = [((slots, rows, problem.v_head_dim), torch.float32), ((slots, rows), torch.float32)]
    if not shares.merges_at_once:
        return PartialResults(*new_scratch(device, *parts, ((units, 2), torch.int32)))
    out, lse_log2 = new_scratch(device, *parts)
    groups = triton.cdiv(shares.count, GROUPED_PIECES.value)
    counters = torch.zeros((units, q_blocks, 1 + groups), dtype=torch.int32, device=device)
    return PartialResults(out, lse_log2, counters)


def with_merge(
    attention: TritonLaunch,
    partials: PartialResults | None,
    problem: PagedAttention,
    q_blocks: int,
    results: Results,
    least_q_len: int | None = None,
) -> list[TritonLaunch]:
    """Return the launches of a call: `attention`, and if units are cut the merge, which writes the rows of those.

    With `least_q_len`, they are for requests of `least_q_len` to `problem.max_q_len` query tokens.
    """
    if partials is None:
        return [attention]
    units, group = problem.batch_size * problem.num_kv_heads, problem.num_qo_heads // problem.num_kv_heads
    packed_rows = problem.max_q_len * group
    rows, dims = merge_block(units * packed_rows, problem.v_head_dim)
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
        GROUP=group,
        HEAD_DIM=problem.v_head_dim,
        BLOCK_ROWS=partials.out.shape[1],
        MERGED_ROWS=rows,
        MERGED_DIMS=dims,
        LANES=max(1, MERGED_SUMS // (rows * dims)),
        AT_A_TIME=MERGED_AT_A_TIME.value,
        OVERLAPS=overlaps,
        scratch=partials,
        num_warps=MERGE_WARPS,
        launch_pdl=overlaps,
    )
    return [attention, merge]


def merge_block(num_rows: int, head_dim: int) -> tuple[int, int]:
    """Return (rows, elements of head_dim) of one program of the merge.

    If rows are few, each has many partial results, and the threads of a program share them (results/nvidia-h200/kernels.md,
    "Tiles and their neighbours").

    Args:
        num_rows: of all requests and heads.
        head_dim: of the output.
    """
    elements = num_rows * head_dim // MERGE_PROGRAMS
    if elements < 64:
        return 1, min(head_dim, 32)
    return min(MOST_MERGED_ROWS, triton.next_power_of_2(max(1, elements // 128))), min(head_dim, 128)


def overlaps_launches(device: torch.device) -> bool:
    """Return True where a launch may begin beside the end of the one before it (programmatic dependent launch)."""
    family = family_of(capability_of(device))
    return family is not None and family.overlaps_launches


@triton.jit
def await_launch_before():
    """Let the last program wait for the launch before this one: a launch that waits for this one then waits for both."""
    if (tl.program_id(0) == tl.num_programs(0) - 1) & (tl.program_id(1) == tl.num_programs(1) - 1):
        gdc_wait()


@triton.jit
def slot_of(share, q_block, q_blocks, begins_unit):
    """Return the slot of a partial result. A share has two: for a unit that it begins, and for one that another begins."""
    return (share * q_blocks + q_block) * 2 + begins_unit.to(tl.int64)


@triton.jit
def store_unit_shares(unit_shares, unit, first_place, tiles, share_places):
    """Write the first and the last share that have keys of a unit; `first_place` is that of its first tile."""
    tl.store(unit_shares + unit * 2, (first_place // share_places).to(tl.int32))
    tl.store(unit_shares + unit * 2 + 1, ((first_place + tiles - 1) // share_places).to(tl.int32))


@triton.jit
def store_share(
    state,  # (largest, denominator, sums [ROWS, DIMS]) of a softmax
    rows,  # (row * num_qo_heads + head of the output, int64 [ROWS]; head; True where the row exists; the slot's row)
    dims,  # elements of a row, a part of the first ROW_DIMS
    is_whole,  # True: these are all keys of the rows
    sinks,
    bmm2_scale,
    results,  # (out, lse_log2 or None)
    partials,  # None: every share holds whole units
    ROW_DIMS: tl.constexpr = None,  # None: as many as `dims`, and blocks are as small as the rows allow
):
    """Write a block of rows of one share: the output, or a slot's normalised sums and their LSE."""
    largest, denominator, sums = state
    row_head, head, row_exists, row = rows
    DIMS: tl.constexpr = dims.shape[0] if ROW_DIMS is None else ROW_DIMS
    if is_whole or partials is None:
        sink_log2 = None
        if sinks is not None:
            sink_log2 = tl.load(sinks + head, mask=row_exists, other=0.0) * LOG2_E
        store_rows(
            largest,
            denominator,
            sums,
            sink_log2,
            bmm2_scale,
            results[0] + row_head * DIMS,
            None if results[1] is None else results[1] + row_head,
            dims,
            row_exists,
        )
    else:
        divisor = tl.where(denominator == 0, 1.0, denominator)
        exists = None if ROW_DIMS is None else row_exists[:, None]
        tl.store(partials.out + row[:, None] * DIMS + dims[None, :], sums / divisor[:, None], mask=exists)
        tl.store(partials.lse_log2 + row, log2_sum(largest, denominator))


@triton.jit
def merge_if_last(
    block,  # (unit, q_block, q_blocks)
    cut,  # (place of the unit's first tile, its tiles, this share, the places of a share, the number of shares)
    rows,  # as for `store_share`
    dims,
    sinks,
    bmm2_scale,
    results,  # (out, lse_log2 or None)
    partials,
    ROWS: tl.constexpr,
):
    """Merge the pieces of a block of rows if this program, which has stored its own piece, is the last to do so."""
    unit, q_block, q_blocks = block
    first_place, tiles, share, share_places, num_shares = cut
    first = first_place // share_places
    last = (first_place + tiles - 1) // share_places
    group = (share - first) // GROUPED_PIECES
    begin = first + group * GROUPED_PIECES
    end = tl.minimum(begin + GROUPED_PIECES, last + 1)
    num_groups = tl.cdiv(last - first + 1, GROUPED_PIECES)
    counters = partials.of_units + (unit * q_blocks + q_block) * (1 + tl.cdiv(num_shares, GROUPED_PIECES))
    if arrives_last(counters + 1 + group, end - begin):
        state = merged((first, begin, end, 1), q_block, q_blocks, rows[2], dims, partials, ROWS)
        if num_groups == 1:
            store_share(state, rows, dims, True, sinks, bmm2_scale, results, None)
        else:  # in the slot of the group's first piece, once all threads have read that
            tl.debug_barrier()
            row = slot_of(begin, q_block, q_blocks, begin == first) * ROWS + tl.arange(0, ROWS)
            store_share(state, (rows[0], rows[1], rows[2], row), dims, False, sinks, bmm2_scale, results, partials)
            if arrives_last(counters, num_groups):
                pieces = (first, first, last + 1, GROUPED_PIECES)
                state = merged(pieces, q_block, q_blocks, rows[2], dims, partials, ROWS)
                store_share(state, rows, dims, True, sinks, bmm2_scale, results, None)


@triton.jit
def arrives_last(counter, expected):
    """Count this program's arrival, and return True in the last of `expected` programs, which leaves the counter zero.

    The last reads what the others have stored before they arrived. In the terms of PTX's memory model ("Causality Order"):
    each thread's stores come before the program's barrier, and the barrier before the atomic of its first thread, which
    releases them to the GPU. Every arrival is a read-modify-write of one counter, so that the last one observes all others,
    through those in between, and acquires what they released; the barrier that hands the count to its threads comes before
    their loads. So no load of these threads returns older contents, not even from the L1 of their multiprocessor, which the
    acquiring atomic invalidates. After the last arrival only the last program touches the counter, and a launch ends before
    the next launch's first arrival.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    tl.debug_barrier()
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def merged(
    pieces,  # by their shares: (the first of the unit; the first of those that are merged, their end, the step between them)
    q_block,
    q_blocks,
    row_exists,
    dims,
    partials,
    ROWS: tl.constexpr,
):
    """Return the state of a softmax over the keys of some pieces of a unit, (largest, denominator, sums [ROWS, DIMS])."""
    first, begin, end, step = pieces
    DIMS: tl.constexpr = dims.shape[0]
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(begin, end, MERGED_AT_A_TIME * step):
        # A thread adds up elements of its own: no warp waits for another, and the loads of all these pieces go out together.
        for number in tl.static_range(MERGED_AT_A_TIME):
            share = start + number * step
            exists = row_exists & (share < end)
            row = slot_of(share, q_block, q_blocks, share == first) * ROWS + tl.arange(0, ROWS)
            lse = tl.load(partials.lse_log2 + row, mask=exists, other=float("-inf"))
            part = tl.load(partials.out + row[:, None] * DIMS + dims[None, :], mask=exists[:, None], other=0.0)
            new_largest = tl.maximum(largest, lse)
            origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weight = tl.exp2(lse - origin)
            rescale = tl.exp2(largest - origin)
            denominator = denominator * rescale + weight
            sums = sums * rescale[:, None] + part * weight[:, None]
            largest = new_largest
    return largest, denominator, sums


@triton.jit(do_not_specialize=["least_q_len", "max_q_len", "q_blocks", "batch_size", "num_kv_heads"])
def merge_kernel(
    partials,
    cu_seqlens_q,  # None: every request has max_q_len rows
    sinks,
    bmm2_scale,
    results,  # (out, lse_log2 or None)
    least_q_len,  # as for the attention
    max_q_len,
    q_blocks,
    batch_size,  # None: the first two numbers of a program are a unit and a block of its rows, which it may lack
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    MERGED_DIMS: tl.constexpr,
    LANES: tl.constexpr,
    AT_A_TIME: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Merge some rows of one unit: weight its partial results by 2 ** their LSE, and count the sink once."""
    if OVERLAPS:  # every program, for what is launched next waits for this launch alone
        gdc_wait()
    unit = tl.program_id(0)
    if batch_size is not None:  # the numbers are a block of the rows of all requests, and a K/V head
        kind = (cu_seqlens_q, least_q_len, max_q_len)
        lanes = tl.arange(0, BLOCK_REQUESTS)
        found, first_block, _, _ = block_at(unit, batch_size, kind, lanes, GROUP, MERGED_ROWS)
        if found >= batch_size:
            return
        row_block = unit - first_block
        unit = found * num_kv_heads + tl.program_id(1)
    first_share = tl.load(partials.of_units + unit * 2).to(tl.int64)
    last_share = tl.load(partials.of_units + unit * 2 + 1).to(tl.int64)
    if first_share == last_share:  # a program had the unit whole, and has written it
        return
    request = (unit // num_kv_heads).to(tl.int64)
    q_start, q_len = request_rows(cu_seqlens_q, request, max_q_len)
    if least_q_len is not None and (q_len < least_q_len) | (q_len > max_q_len):  # another launch's
        return
    first_packed = (tl.program_id(1) if batch_size is None else row_block) * MERGED_ROWS
    if first_packed >= q_len * GROUP:
        return
    packed = first_packed + tl.arange(0, MERGED_ROWS)
    token = packed // GROUP
    head = unit % num_kv_heads * GROUP + packed % GROUP
    row_exists = token < q_len
    dims = tl.program_id(2) * MERGED_DIMS + tl.arange(0, MERGED_DIMS)
    q_block = first_packed // BLOCK_ROWS
    block_row = packed % BLOCK_ROWS

    largest = tl.full([MERGED_ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + head, mask=row_exists, other=float("-inf")) * LOG2_E
    sink_log2 = largest
    for start in range(first_share, last_share + 1, LSES_AT_A_TIME):
        share = start + tl.arange(0, LSES_AT_A_TIME)
        row = slot_of(share, q_block, q_blocks, share == first_share)[:, None] * BLOCK_ROWS + block_row[None, :]
        lses = tl.load(partials.lse_log2 + row, mask=(share <= last_share)[:, None], other=float("-inf"))
        largest = tl.maximum(largest, tl.max(lses, 0))
    origin = tl.where(largest == float("-inf"), 0.0, largest)

    denominators = tl.zeros([LANES, MERGED_ROWS], tl.float32)
    sums = tl.zeros([LANES, MERGED_ROWS, MERGED_DIMS], tl.float32)
    for start in range(first_share, last_share + 1, LANES * AT_A_TIME):
        for step in tl.static_range(AT_A_TIME):
            share = start + step * LANES + tl.arange(0, LANES)
            exists = (share <= last_share)[:, None]
            row = slot_of(share, q_block, q_blocks, share == first_share)[:, None] * BLOCK_ROWS + block_row[None, :]
            parts = tl.load(
                partials.out + row[:, :, None] * HEAD_DIM + dims[None, None, :], mask=exists[:, :, None], other=0.0
            )
            lses = tl.load(partials.lse_log2 + row, mask=exists, other=float("-inf"))
            weights = tl.exp2(lses - origin[None, :])
            sums += parts * weights[:, :, None]
            denominators += weights
    denominator = tl.sum(denominators, 0)
    if sinks is not None:
        denominator += tl.exp2(sink_log2 - origin)
    row_head = (q_start + token) * (num_kv_heads * GROUP) + head
    divisor = tl.where(denominator == 0, 1.0, denominator)
    out, lse_log2 = results
    result = rounded(tl.sum(sums, 0) * scalar(bmm2_scale) / divisor[:, None], out.dtype.element_ty)
    tl.store(out + row_head[:, None] * HEAD_DIM + dims[None, :], result, mask=row_exists[:, None])
    if lse_log2 is not None and tl.program_id(2) == 0:
        tl.store(lse_log2 + row_head, log2_sum(largest, denominator), mask=row_exists)
