"""The ragged K/V lists of a multi-step draft in Triton, for any GPU that Triton compiles for and for its CPU interpreter.

Glossary:

* step: one decode pass of the draft model. It has a row of `kv_indices` and a row of `kv_indptr`.
* branch: one of the `topk` continuations that each request drafts. A branch drafts one token per step.
* prefix: the tokens that a request has before the draft.
* slot: the index of a token in the K/V pool. `req_to_token` maps a position of a request to a slot.
* list: the slots that one branch reads in one step: its prefix, and the tokens that it has drafted, the step's own included.
* boundary: an entry of `kv_indptr`. The lists of a step lie end to end; list i begins at boundary i and ends before
  boundary i + 1.
* block: the tokens that a program copies at a time.
* share: the blocks of a request's prefix that one program copies: every n-th block, where n programs divide the prefix.

One request with a prefix of 3 tokens (p), two branches (a, b), two steps, page size 1::

    req_to_token   p0 p1 p2 a0 a1 b0 b1
    kv_indices[0]  p0 p1 p2 a0 p0 p1 p2 b0          kv_indptr[0]  0 4 8
    kv_indices[1]  p0 p1 p2 a0 a1 p0 p1 p2 b0 b1    kv_indptr[1]  0 5 10
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.calls.arguments import check_int, check_tensor, check_vector
from lab.kernels.serving.arguments import INDEX_DTYPES, check_matrix
from lab.kernels.support import refuse_without_triton
from lab.named_enum import NamedEnum

# Tokens of a block in the serial schedule. SGLang's kernel has the same number (0.5.11).
SERIAL_BLOCK_TOKENS = 128
# Tokens of a block in the spread schedule: each of 128 threads stores 16 bytes of int32. This number and
# MAX_SPREAD_PROGRAMS were measured: results/nvidia-h200/kernels.md, "Metadata kernels".
SPREAD_BLOCK_TOKENS = 512
# Most programs that copy prefixes in the spread schedule (rounded up to as many for each request): three times as many as an
# H200 runs at a time. The host does not know the lengths. More programs would find nothing to copy for short requests; fewer
# would copy many blocks one after another for long ones.
MAX_SPREAD_PROGRAMS = 6144
# Requests whose lengths a program sums at a time.
BLOCK_REQUESTS = 256
# Stores to `kv_indices` begin at a multiple of this many elements: 8 of int32 fill a 32-byte sector of L2.
STORE_ALIGNMENT: tl.constexpr = tl.constexpr(8)


class Schedule(NamedEnum):
    """A division of the work into programs."""

    # One program per (step, request, branch) copies a whole prefix, as in SGLang's kernel. Change 26241 stopped launching that
    # kernel for MLA drafts.
    SERIAL = "serial"
    # Several programs divide each prefix. A program reads a token from memory once and writes it for all steps and branches.
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

    The host reads no tensor's contents, so a CUDA graph can capture the launch. Cells of ``kv_indices`` after a step's last
    list are not written. Column 0 of ``kv_indptr`` is not written either: the engine keeps a 0 there. A list that is too long
    for its row of ``kv_indices`` is cut at the row's end. A position beyond the columns of ``req_to_token`` has slot 0.

    Triton compiles one kernel per schedule, number of steps, ``topk``, page size and dtypes, and another where ``kv_indices``
    does not start at a multiple of 16 bytes. It compiles nothing for another batch size, length or row width.

    Args:
        req_pool_indices: ``[num_requests]`` int32 or int64, each request's row of ``req_to_token``.
        req_to_token: ``[num_rows, row_width]`` int32 or int64, the slot at each position of a request. Each row is contiguous;
            the rows may have gaps between them, here and in the two outputs.
        paged_kernel_lens: ``[num_requests]`` int32 or int64, tokens of each prefix.
        kv_indices: ``[num_steps, capacity]`` int32 or int64, written in place: a row of lists for each step.
        kv_indptr: int32 or int64, at least ``[num_steps, num_requests * topk + 1]``, written in place: boundaries of the lists.
        positions: ``[num_requests * topk]`` int32 or int64, each prefix length repeated ``topk`` times. ``kv_indptr[step]`` is
            the running sum of ``positions + step + 1``.
        topk: branches per request.
        page_size: tokens per page.
        schedule: SPREAD, or the slower SERIAL of SGLang to compare it with.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, stride or device, or ``topk`` or ``page_size`` is below 1.
        NotImplementedError: Triton does not run on the device of ``kv_indices``.
    """
    vectors = {"req_pool_indices": req_pool_indices, "paged_kernel_lens": paged_kernel_lens, "positions": positions}
    matrices = {"req_to_token": req_to_token, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    _check(vectors, matrices, topk, page_size)
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
            _serial_kernel[(num_steps, num_requests, topk)](*arguments, **constants, BLOCK_TOKENS=SERIAL_BLOCK_TOKENS)
        else:
            # Row 0 of the grid writes kv_indptr, and row 1 + i the lists of request i.
            grid = (_programs_per_request(num_requests, req_to_token.shape[1]), num_requests + 1)
            _spread_kernel[grid](*arguments, **constants, BLOCK_TOKENS=SPREAD_BLOCK_TOKENS)


def _programs_per_request(num_requests: int, row_width: int) -> int:
    """Return the number of programs that divide a request's prefix: at most one per block of a whole row."""
    blocks_per_row = triton.cdiv(row_width + STORE_ALIGNMENT.value, SPREAD_BLOCK_TOKENS)
    return min(blocks_per_row, triton.cdiv(MAX_SPREAD_PROGRAMS, num_requests))


def _check(vectors: dict[str, Tensor], matrices: dict[str, Tensor], topk: int, page_size: int) -> None:
    """Raise TypeError or ValueError for wrong arguments of `generate_draft_decode_kv_indices`, given by name."""
    check_int("topk", topk, 1, "it is the number of branches per request")
    check_int("page_size", page_size, 1, "it is the number of tokens per page")
    num_requests = check_tensor("req_pool_indices", vectors["req_pool_indices"]).numel()
    for name, tensor in vectors.items():
        check_vector(name, tensor, num_requests * (topk if name == "positions" else 1), INDEX_DTYPES)
    for name, matrix in matrices.items():
        check_matrix(name, matrix, INDEX_DTYPES)
    kv_indices, kv_indptr = matrices["kv_indices"], matrices["kv_indptr"]
    min_steps, min_boundaries = kv_indices.shape[0], num_requests * topk + 1
    if kv_indptr.shape[0] < min_steps or kv_indptr.shape[1] < min_boundaries:
        raise ValueError(
            f"kv_indptr must be at least [num_steps, num_requests * topk + 1] = {[min_steps, min_boundaries]}, "
            f"got {list(kv_indptr.shape)}"
        )
    for name, tensor in (vectors | matrices).items():
        if tensor.device != kv_indices.device:
            raise ValueError(f"{name} is on {tensor.device}, but kv_indices is on {kv_indices.device}; move it there")


# By default Triton compiles a kernel again where an integer is 1 or a multiple of 16, and where a pointer is a multiple of 16
# bytes. These arguments vary from batch to batch, so neither may compile again. The address of `kv_indices` may: where it is
# aligned, stores are 16 bytes wide.
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
    """Write kv_indptr in row 0 of the grid, and a request's lists in each other row, whose programs take its blocks in turn."""
    share = tl.program_id(0)
    request = tl.program_id(1) - 1
    if request < 0:
        if share == 0:
            _write_indptr(positions, kv_indptr, num_requests * TOPK, kv_indptr_stride, NUM_STEPS, BLOCK_REQUESTS)
    else:
        # These two loads do not wait for each other. Most programs of a short request end after them.
        length = tl.load(paged_kernel_lens + request).to(tl.int32)
        row = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * row_stride
        # `_copy_block` shifts blocks back by fewer than STORE_ALIGNMENT tokens, so a prefix may need one block more.
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
    """Write a whole list and the boundary at its end in program (step, request, branch)."""
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
    """Return the index in its step's row where a list starts; `before` counts the prefix tokens of all requests before it."""
    return before + request * (step + 1) * TOPK + branch * (length + step + 1)


@triton.jit
def _copy_block(
    row, row_width, kv_indices, step_start, list_start, capacity, start, length, BLOCK_TOKENS: tl.constexpr
):
    """Copy a block of a prefix into one list. The block is shifted back so that its stores start at an aligned index.

    Lists start at different indices, so each has its own shift. The slots of the first list come from memory, those of the
    others from L1. A whole block is stored without a mask, because masked stores would be narrower than 16 bytes.
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
    """Return the slots of the tokens that a branch drafts in all steps, `[BLOCK_STEPS]`; 0 for a position without one."""
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
    """Store the slots of the tokens drafted in steps 0 to `step`, the end of a list, from index `at` of its row on."""
    drafted = tl.arange(0, BLOCK_STEPS)
    tl.store(step_row + at + drafted, slots, mask=(drafted <= step) & (at + drafted < capacity))


@triton.jit
def _write_indptr(positions, kv_indptr, num_branches, kv_indptr_stride, NUM_STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Write `kv_indptr[step, 1:num_branches + 1]` of every step."""
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
    """Return the sum of `values[:end]`, int64."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, end, BLOCK):
        total += tl.load(values + start + lanes, mask=start + lanes < end, other=0).to(tl.int64)
    return tl.sum(total)
