"""Partial results: the attention of a unit (one request and one K/V head) over the keys that one program reads.

Partial results exist if several programs divide the keys of a unit; `lab.kernels.portable.merge` merges them. A slot is scratch
memory for one partial result, and a share is a program's part of the keys (`lab.kernels.portable.key_shares`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lab.calls.problem import PagedAttention
from lab.gpus import capability_of, family_of
from lab.kernels.portable.key_shares import Shares
from lab.kernels.portable.softmax import LOG2_E, log2_sum, store_rows
from lab.kernels.portable.triton_call import new_scratch

GROUPED_PIECES: tl.constexpr = tl.constexpr(16)  # partial results in a group, if the last program merges

Results = tuple[torch.Tensor, torch.Tensor | None]  # a call's output, and its LSE in base 2 or None


class PartialResults(NamedTuple):
    """Scratch memory for the partial results of all programs: normalised outputs and their LSE. A program has room for two,
    because its keys may begin inside the keys of one request and K/V head, and end inside the keys of another.
    """

    out: torch.Tensor  # float32 [q_blocks * shares * 2, rows, v_head_dim]
    lse_log2: torch.Tensor  # float32 [q_blocks * shares * 2, rows], base 2; -inf if a row sees none of the keys
    # int32. If a second launch merges: [units, 2], the first and the last share with keys of each unit. Else [units, 1 +
    # groups], counters that are zero between launches: how many groups of GROUPED_PIECES partial results have been merged, and
    # how many partial results of each group have been stored.
    of_units: torch.Tensor


def new_partials(shares: Shares | None, q_blocks: int, rows: int, problem: PagedAttention) -> PartialResults | None:
    """Allocate scratch memory for partial results of blocks of `rows` query rows; return None if each program reads all keys.
    The caller's workspace is not used, because streams may share it, and trtllm-gen writes into all of it.
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
    counters = torch.zeros((units, 1 + groups), dtype=torch.int32, device=device)
    return PartialResults(out, lse_log2, counters)


def overlaps_launches(device: torch.device) -> bool:
    """Return True if a launch on this GPU may begin before the previous launch ends (programmatic dependent launch)."""
    family = family_of(capability_of(device))
    return family is not None and family.overlaps_launches


@triton.jit
def await_launch_before():
    """Wait in one program until the previous launch has ended. A launch that waits for this launch has then waited for both."""
    if (tl.program_id(0) == tl.num_programs(0) - 1) & (tl.program_id(1) == tl.num_programs(1) - 1):
        gdc_wait()


@triton.jit
def slot_of(share, q_block, q_blocks, begins_unit):
    """Return the index in `PartialResults` at which program n = share * q_blocks + q_block stores its result for a request and
    K/V head: 2 n + 1 if the program reads the first key of the request (`begins_unit`), 2 n if an earlier program reads it.
    """
    return (share * q_blocks + q_block) * 2 + begins_unit.to(tl.int64)


@triton.jit
def store_unit_shares(unit_shares, unit, first_place, tiles, share_places):
    """Write the indices of the shares that have the first and the last key tile of a unit (one request and K/V head)."""
    tl.store(unit_shares + unit * 2, (first_place // share_places).to(tl.int32))
    tl.store(unit_shares + unit * 2 + 1, ((first_place + tiles - 1) // share_places).to(tl.int32))


@triton.jit
def store_share(
    state,  # (largest, denominator, sums [ROWS, DIMS]) of a softmax
    rows,  # (row * num_qo_heads + head of the output, int64 [ROWS]; head; True where the row exists; row in `partials`)
    dims,  # indices of the stored elements of head_dim
    is_whole,  # True: the program has read all keys of the rows
    sinks,  # None: no sink
    bmm2_scale,  # a number or a pointer
    results,  # (out, lse_log2 or None)
    partials,  # None: every program reads all keys of its rows
    ROW_DIMS: tl.constexpr = None,  # elements of a row; None: as many as `dims`, and absent rows are stored in `partials`
):
    """Write a program's result for one block of rows: the output if it has read all keys of the rows, else a partial result."""
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
def rows_of_unit(packed, q_start, q_len, kv_head, num_kv_heads, GROUP: tl.constexpr):
    """Return (index in the output, query head, True if the row exists) of each packed row (token * GROUP + head in group)."""
    token = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    return (q_start + token) * (num_kv_heads * GROUP) + head, head, token < q_len
