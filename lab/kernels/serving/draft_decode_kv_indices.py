"""The K/V lists of a multi-step draft in Triton: any GPU that Triton compiles for, and a CPU in its interpreter."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.calls.arguments import check_int, check_tensor, check_vector
from lab.kernels.serving.arguments import INDEX_DTYPES, check_table
from lab.kernels.support import refuse_without_triton
from lab.named_enum import NamedEnum

# Tokens per step of the serial schedule: SGLang's number (0.5.11).
SERIAL_TOKENS = 128
# Tokens that a program of the spread schedule copies at a time: one 16-byte store of int32 by each of 128 threads.
SPREAD_TOKENS = 512
# Most programs that the requests share, three times as many as an H200 runs at a time. Lengths are not known on the host: with
# more, a short request leaves more programs empty; with fewer, a long one has blocks left over. Measured, as SPREAD_TOKENS:
# results/nvidia-h200/kernels.md, "Metadata kernels".
SPREAD_PROGRAMS = 6144
# Requests whose lengths are summed at a time.
BLOCK_REQUESTS = 256
# Indices between the addresses that stores start at: int32 fills a 32-byte sector of L2 with them.
STORE_ALIGNMENT: tl.constexpr = tl.constexpr(8)


class Schedule(NamedEnum):
    """A division of the work into programs."""

    # One program per (step, request, branch) walks a whole prefix, as SGLang's did when change 26241 skipped it.
    SERIAL = "serial"
    # Programs share out each prefix; a token is read from memory once and written for all steps and branches.
    SPREAD = "spread"


def generate_draft_decode_kv_indices(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    paged_kernel_lens: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    positions: Tensor,
    *,
    topk: int,
    page_size: int,
    schedule: Schedule = Schedule.SPREAD,
) -> None:
    """Write the ragged K/V lists of every draft step, as `lab.references.generate_draft_decode_kv_indices` defines them.

    Nothing is read on the host, nothing is compiled for a batch size, a length or a row's width. Each row of ``kv_indices``
    stays as it is after its step's last list, and so does column 0 of ``kv_indptr``, where the engine keeps a 0. A list that
    is too long for its row is cut at the row's end, and a position beyond ``req_to_token``'s columns reads slot 0.

    Args:
        req_pool_indices: ``[num_requests]`` int32 or int64, rows of ``req_to_token``.
        req_to_token: ``[num_rows, row_width]`` int32 or int64, slots by position; rows may have gaps between them.
        paged_kernel_lens: ``[num_requests]`` int32 or int64, tokens of each prefix.
        kv_indices: ``[num_steps, capacity]`` int32 or int64, written in place. Its rows are the draft steps.
        kv_indptr: ``[>= num_steps, > num_requests * topk]`` int32 or int64, written in place.
        positions: ``[num_requests * topk]`` int32 or int64, each prefix length ``topk`` times: ``kv_indptr`` is their sum.
        topk: branches per request.
        page_size: tokens per page.
        schedule: the fast one, or the one that the engine could skip.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device.
        NotImplementedError: Triton does not run here.
    """
    vectors = {"req_pool_indices": req_pool_indices, "paged_kernel_lens": paged_kernel_lens, "positions": positions}
    tables = {"req_to_token": req_to_token, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    _check(vectors, tables, topk, page_size)
    refuse_without_triton(kv_indices.device)
    num_requests, num_steps = req_pool_indices.shape[0], kv_indices.shape[0]
    if num_requests == 0 or num_steps == 0:
        return
    arguments = (
        req_pool_indices,
        req_to_token,
        paged_kernel_lens,
        kv_indices,
        kv_indptr,
        positions,
        num_requests,
        req_to_token.shape[1],
        req_to_token.stride(0),
        kv_indices.shape[1],
        kv_indices.stride(0),
        kv_indptr.stride(0),
    )
    constants = {
        "NUM_STEPS": num_steps,
        "TOPK": topk,
        "PAGE_SIZE": page_size,
        "BLOCK_STEPS": triton.next_power_of_2(num_steps),
        "BLOCK_REQUESTS": BLOCK_REQUESTS,
    }
    with torch.cuda.device_of(kv_indices):  # Triton launches on the current device
        if schedule is Schedule.SERIAL:
            _serial_kernel[(num_steps, num_requests, topk)](*arguments, **constants, BLOCK_TOKENS=SERIAL_TOKENS)
        else:
            # One row of programs for kv_indptr, and one per request.
            shares = _programs_per_request(num_requests, req_to_token.shape[1])
            _spread_kernel[(shares, num_requests + 1)](*arguments, **constants, BLOCK_TOKENS=SPREAD_TOKENS)


def _programs_per_request(num_requests: int, row_width: int) -> int:
    """Return the programs of each request: no more than a whole row has blocks."""
    useful = triton.cdiv(row_width + STORE_ALIGNMENT.value, SPREAD_TOKENS)
    return min(useful, triton.cdiv(SPREAD_PROGRAMS, num_requests))


def _check(vectors: dict[str, Tensor], tables: dict[str, Tensor], topk: int, page_size: int) -> None:
    """Raise TypeError or ValueError for wrong arguments of `generate_draft_decode_kv_indices`, given by name."""
    check_int("topk", topk, 1, "it is the number of branches per request")
    check_int("page_size", page_size, 1, "it is the number of tokens per page")
    num_requests = check_tensor("req_pool_indices", vectors["req_pool_indices"]).numel()
    for name, tensor in vectors.items():
        check_vector(name, tensor, num_requests * (topk if name == "positions" else 1), INDEX_DTYPES)
    for name, table in tables.items():
        check_table(name, table, INDEX_DTYPES)
    kv_indices, kv_indptr = tables["kv_indices"], tables["kv_indptr"]
    least = (kv_indices.shape[0], num_requests * topk + 1)
    if kv_indptr.shape[0] < least[0] or kv_indptr.shape[1] < least[1]:
        raise ValueError(
            f"kv_indptr must be at least [num_steps, num_requests * topk + 1] = {list(least)}, got {list(kv_indptr.shape)}"
        )
    for name, tensor in (vectors | tables).items():
        if tensor.device != kv_indices.device:
            raise ValueError(f"{name} is on {tensor.device}, but kv_indices is on {kv_indices.device}; move it there")


# What varies from batch to batch must not compile again, not even for its value 1 or its multiples of 16, nor for where a
# slice starts.
_VARYING = ["num_requests", "row_width", "row_stride", "capacity", "kv_indices_stride", "kv_indptr_stride"]
_UNALIGNED = ["req_pool_indices", "req_to_token", "paged_kernel_lens", "kv_indptr", "positions"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _spread_kernel(
    req_pool_indices,
    req_to_token,
    paged_kernel_lens,
    kv_indices,
    kv_indptr,
    positions,
    num_requests,
    row_width,
    row_stride,
    capacity,
    kv_indices_stride,
    kv_indptr_stride,
    NUM_STEPS: tl.constexpr,
    TOPK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Sum kv_indptr in row 0 of the programs; copy a request's prefix in each other row, its blocks dealt out in turn."""
    share = tl.program_id(0)
    request = tl.program_id(1) - 1
    if request < 0:
        if share == 0:
            _write_indptr(positions, kv_indptr, num_requests * TOPK, kv_indptr_stride, NUM_STEPS, BLOCK_REQUESTS)
    else:
        # Two loads that do not wait for each other; most programs of a short request end after them.
        length = tl.load(paged_kernel_lens + request).to(tl.int32)
        row = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * row_stride
        # Blocks are shifted back by less than STORE_ALIGNMENT tokens, so there may be one more than the length has.
        if (share == 0) | (share * BLOCK_TOKENS < length + STORE_ALIGNMENT):
            before = _sum_before(paged_kernel_lens, request, BLOCK_REQUESTS) * TOPK
            stride = tl.num_programs(0) * BLOCK_TOKENS
            for start in range(share * BLOCK_TOKENS, length + STORE_ALIGNMENT, stride):
                for step in tl.static_range(NUM_STEPS):
                    for branch in range(TOPK):
                        step_start = step * kv_indices_stride.to(tl.int64)
                        list_start = _list_start(before, request, branch, step, length, TOPK)
                        _copy_block(
                            row, row_width, kv_indices, step_start, list_start, capacity, start, length, BLOCK_TOKENS
                        )
            if share == 0:
                for branch in range(TOPK):
                    drafted = _drafted_slots(row, row_width, length, branch, NUM_STEPS, TOPK, PAGE_SIZE, BLOCK_STEPS)
                    for step in tl.static_range(NUM_STEPS):
                        end = _list_start(before, request, branch, step, length, TOPK) + length
                        step_row = kv_indices + step * kv_indices_stride.to(tl.int64)
                        _store_drafted(drafted, step_row, end, step, capacity, BLOCK_STEPS)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _serial_kernel(
    req_pool_indices,
    req_to_token,
    paged_kernel_lens,
    kv_indices,
    kv_indptr,
    positions,
    num_requests,
    row_width,
    row_stride,
    capacity,
    kv_indices_stride,
    kv_indptr_stride,
    NUM_STEPS: tl.constexpr,
    TOPK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Write one whole list in program (step, request, branch)."""
    step = tl.program_id(0)
    request = tl.program_id(1)
    branch = tl.program_id(2)
    length = tl.load(paged_kernel_lens + request).to(tl.int32)
    row = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * row_stride
    before = _sum_before(paged_kernel_lens, request, BLOCK_REQUESTS) * TOPK
    first = _list_start(before, request, branch, step, length, TOPK)
    step_row = kv_indices + step.to(tl.int64) * kv_indices_stride
    lanes = tl.arange(0, BLOCK_TOKENS)
    for start in range(0, length, BLOCK_TOKENS):
        token = start + lanes
        slots = tl.load(row + token, mask=(token < length) & (token < row_width), other=0)
        tl.store(step_row + first + token, slots, mask=(token < length) & (first + token < capacity))
    drafted = _drafted_slots(row, row_width, length, branch, NUM_STEPS, TOPK, PAGE_SIZE, BLOCK_STEPS)
    _store_drafted(drafted, step_row, first + length, step, capacity, BLOCK_STEPS)
    end = request * TOPK + branch + 1
    boundary = _sum_before(positions, end, BLOCK_REQUESTS) + end * (step + 1)
    tl.store(kv_indptr + step * kv_indptr_stride + end, boundary)


@triton.jit
def _list_start(before, request, branch, step, length, TOPK: tl.constexpr):
    """Return the start of a branch's list in its step's row: `before` prefix tokens, and step + 1 of each branch before it."""
    return before + request * (step + 1) * TOPK + branch * (length + step + 1)


@triton.jit
def _copy_block(
    row, row_width, kv_indices, step_start, list_start, capacity, start, length, BLOCK_TOKENS: tl.constexpr
):
    """Copy a block of a prefix into one list, shifted so that its stores start at an aligned index.

    Each list starts at an index of its own, so each has its own shift. The tokens come from memory for the first list and
    from L1 for the others. Whole blocks have no mask: it would keep the stores from being 16 bytes wide.
    """
    lanes = tl.arange(0, BLOCK_TOKENS)
    shift = ((step_start + list_start) % STORE_ALIGNMENT).to(tl.int32)
    first = start - shift
    token = first + lanes
    target = kv_indices + tl.multiple_of(step_start + list_start + first, STORE_ALIGNMENT) + lanes
    end = first + BLOCK_TOKENS
    if (first >= 0) & (end <= length) & (end <= row_width) & (list_start + end <= capacity):
        tl.store(target, tl.load(row + token))
    else:
        inside = (token >= 0) & (token < length)
        slots = tl.load(row + token, mask=inside & (token < row_width), other=0)
        tl.store(target, slots, mask=inside & (list_start + token < capacity))


@triton.jit
def _drafted_slots(
    row,
    row_width,
    length,
    branch,
    NUM_STEPS: tl.constexpr,
    TOPK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    """Return the slots of the tokens that a branch drafts, `[BLOCK_STEPS]`."""
    if PAGE_SIZE == 1 or TOPK == 1:
        start = length + branch * NUM_STEPS
    else:  # each branch continues in its own copy of the prefix's last page
        pages_per_branch = tl.cdiv(length % PAGE_SIZE + NUM_STEPS, PAGE_SIZE)
        start = length + branch * pages_per_branch * PAGE_SIZE
    drafted = tl.arange(0, BLOCK_STEPS)
    position = start + drafted
    inside = (drafted < NUM_STEPS) & (position >= 0) & (position < row_width)
    return tl.load(row + position, mask=inside, other=0)


@triton.jit
def _store_drafted(slots, step_row, at, step, capacity, BLOCK_STEPS: tl.constexpr):
    """Append a step's drafted tokens, its own the last, to a list that ends at index `at`."""
    drafted = tl.arange(0, BLOCK_STEPS)
    tl.store(step_row + at + drafted, slots, mask=(drafted <= step) & (at + drafted < capacity))


@triton.jit
def _write_indptr(positions, kv_indptr, num_branches, kv_indptr_stride, NUM_STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Write boundaries 1, 2, ... of every step."""
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([], tl.int64)
    for start in range(0, num_branches, BLOCK):
        branch = start + lanes
        inside = branch < num_branches
        prefix = tl.load(positions + branch, mask=inside, other=0).to(tl.int64)
        end = before + tl.cumsum(prefix)
        for step in tl.static_range(NUM_STEPS):
            boundary = end + (branch + 1) * (step + 1)
            tl.store(kv_indptr + step * kv_indptr_stride + branch + 1, boundary, mask=inside)
        before += tl.sum(prefix)


@triton.jit
def _sum_before(values, end, BLOCK: tl.constexpr):
    """Return the sum of the first `end` of `values`, int64."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, end, BLOCK):
        total += tl.load(values + start + lanes, mask=start + lanes < end, other=0).to(tl.int64)
    return tl.sum(total)
