"""The Triton kernels that `lab.kernels.serving.draft_decode_kv_indices` launches; its glossary explains the terms."""

from typing import NamedTuple

import triton
import triton.language as tl

# Stores to `kv_indices` begin at a multiple of this many elements: 8 of int32 fill a 32-byte sector of L2.
STORE_ALIGNMENT: tl.constexpr = tl.constexpr(8)


class ListsForm(NamedTuple):
    """Compile-time parameters of both kernels in this module: sizes of the K/V lists, and the work of a program."""

    num_steps: int
    topk: int
    page_size: int
    window_size: int
    sink_size: int
    entry_page_size: int
    block_steps: int  # a power of two, at least `num_steps`
    block_requests: int  # requests whose lengths a program sums at a time
    block_tokens: int  # tokens that a program copies at a time
    by_token_blocks: bool  # True: several programs of the serial kernel divide a list


# By default Triton compiles a kernel again for an integer of 1 or a multiple of 16, and for an address of a multiple of 16
# bytes. These arguments differ from batch to batch and must not compile it again. Only the alignment of `kv_indices` may: if it
# is aligned, stores are 16 bytes wide.
_VARYING = ["num_requests", "row_width", "row_stride", "capacity", "kv_indices_stride", "kv_indptr_stride"]
_UNALIGNED = ["req_pool_indices", "req_to_token", "paged_kernel_lens", "kv_indptr", "positions", "v2p"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _spread_kernel(
    req_pool_indices,
    req_to_token,
    paged_kernel_lens,
    kv_indices,
    kv_indptr,
    positions,
    num_requests,  # the tensors above are those of `generate_draft_decode_kv_indices`
    row_width,  # columns of `req_to_token`
    row_stride,  # elements from one row of `req_to_token` to the next
    capacity,  # columns of `kv_indices`
    kv_indices_stride,
    kv_indptr_stride,
    v2p,  # None: slots are not virtual
    FORM: tl.constexpr,  # `ListsForm`
):
    """Write the K/V lists of all requests, and their boundaries in kv_indptr. Row 0 of the grid writes kv_indptr, and row 1 + i
    writes the lists of request i. Each of n programs in a row copies every n-th block of the request's prefix tokens.
    """
    NUM_STEPS: tl.constexpr = FORM.num_steps
    share = tl.program_id(0)
    request = tl.program_id(1) - 1
    if request < 0:
        if share == 0:
            _write_indptr(positions, kv_indptr, num_requests * FORM.topk, kv_indptr_stride, FORM)
    else:
        # These two loads do not wait for each other.
        length = tl.load(paged_kernel_lens + request).to(tl.int32)
        row = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * row_stride
        kept = _kept(length, FORM)
        # `_copy_block` shifts blocks back by fewer than STORE_ALIGNMENT tokens, so a prefix may need one block more.
        if (share == 0) | (share * FORM.block_tokens < kept + STORE_ALIGNMENT):
            before = _sum_before(paged_kernel_lens, request, FORM) * FORM.topk
            stride = tl.num_programs(0) * FORM.block_tokens
            for start in range(share * FORM.block_tokens, kept + STORE_ALIGNMENT, stride):
                for step in tl.static_range(NUM_STEPS):
                    for branch in range(FORM.topk):
                        step_start = step * kv_indices_stride.to(tl.int64)
                        list_start = _list_start(before, request, branch, step, kept, FORM)
                        _copy_block(
                            row, row_width, v2p, kv_indices, step_start, list_start, capacity, start, length, FORM
                        )
            if share == 0:
                for branch in range(FORM.topk):
                    drafted = _drafted_slots(row, row_width, v2p, length, branch, FORM)
                    for step in tl.static_range(NUM_STEPS):
                        end = _list_start(before, request, branch, step, kept, FORM) + kept
                        step_row = kv_indices + step * kv_indices_stride.to(tl.int64)
                        _store_drafted(drafted, step_row, end, step, capacity, FORM)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _serial_kernel(
    req_pool_indices,
    req_to_token,
    paged_kernel_lens,
    kv_indices,
    kv_indptr,
    positions,
    num_requests,  # all arguments are those of `_spread_kernel`
    row_width,
    row_stride,
    capacity,
    kv_indices_stride,
    kv_indptr_stride,
    v2p,
    FORM: tl.constexpr,
):
    """Write the K/V list of one step, request and branch, and its end to kv_indptr. FORM.by_token_blocks: programs share it."""
    step = tl.program_id(0)
    request = tl.program_id(1)
    branch = tl.program_id(2)
    share = 0
    stride = FORM.block_tokens
    if FORM.by_token_blocks:
        share = step // FORM.num_steps
        stride = tl.num_programs(0) // FORM.num_steps * FORM.block_tokens
        step = step % FORM.num_steps
    length = tl.load(paged_kernel_lens + request).to(tl.int32)
    row = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * row_stride
    kept = _kept(length, FORM)
    before = _sum_before(paged_kernel_lens, request, FORM) * FORM.topk
    first = _list_start(before, request, branch, step, kept, FORM)
    step_row = kv_indices + step.to(tl.int64) * kv_indices_stride
    lanes = tl.arange(0, FORM.block_tokens)
    for start in range(share * FORM.block_tokens, kept, stride):
        token = start + lanes
        slots = _load_slots(row, row_width, v2p, _position(token, length, FORM), token < kept, FORM)
        tl.store(step_row + first + token, slots, mask=(token < kept) & (first + token < capacity))
    if share == 0:
        drafted = _drafted_slots(row, row_width, v2p, length, branch, FORM)
        _store_drafted(drafted, step_row, first + kept, step, capacity, FORM)
        end = request * FORM.topk + branch + 1
        boundary = _sum_before(positions, end, FORM) + end * (step + 1)
        tl.store(kv_indptr + step * kv_indptr_stride + end, boundary)


@triton.jit
def _kept(lengths, FORM: tl.constexpr):
    """Return how many of a prefix's tokens are in a K/V list: `lengths`, or with a window at most window_size + sink_size."""
    if FORM.window_size > 0:
        lengths = tl.minimum(lengths, FORM.window_size + FORM.sink_size)
    return lengths


@triton.jit
def _position(token, length, FORM: tl.constexpr):
    """Return the position in a prefix of the token at index `token` of a K/V list."""
    if FORM.window_size > 0:
        skipped = tl.maximum(length - (FORM.window_size + FORM.sink_size), 0)
        token = tl.where(token < FORM.sink_size, token, token + skipped)
    return token


@triton.jit
def _load_slots(row, row_width, v2p, position, inside, FORM: tl.constexpr):
    """Return the K/V slots at positions of a request; 0 beyond the end of its `row`, undefined where `inside` is False."""
    if FORM.entry_page_size == 1:
        slots = tl.load(row + position, mask=inside & (position < row_width), other=0)
    else:
        column = position // FORM.entry_page_size
        page = tl.load(row + column, mask=inside & (column < row_width), other=0).to(tl.int64)
        slots = page * FORM.entry_page_size + position % FORM.entry_page_size
    if v2p is not None:
        slots = slots.to(tl.int64)
        page = tl.load(v2p + slots // FORM.page_size, mask=inside & (slots >= 0), other=-1).to(tl.int64)
        slots = tl.where(page >= 0, page * FORM.page_size + slots % FORM.page_size, 0)
    return slots


@triton.jit
def _list_start(before, request, branch, step, kept, FORM: tl.constexpr):
    """Return where a list begins in `kv_indices[step]`. `before`: number of prefix tokens in earlier requests' lists there."""
    return before + request * (step + 1) * FORM.topk + branch * (kept + step + 1)


@triton.jit
def _copy_block(row, row_width, v2p, kv_indices, step_start, list_start, capacity, start, length, FORM: tl.constexpr):
    """Copy the K/V slots of one block of prefix tokens, from token `start` on, into the list that begins at index `list_start`
    of a row of kv_indices. The block is shifted back so that its stores are aligned. A whole block is stored without a mask,
    because masked stores would be narrower than 16 bytes.
    """
    lanes = tl.arange(0, FORM.block_tokens)
    shift = ((step_start + list_start) % STORE_ALIGNMENT).to(tl.int32)
    first = start - shift
    token = first + lanes
    target = kv_indices + tl.multiple_of(step_start + list_start + first, STORE_ALIGNMENT) + lanes
    end = first + FORM.block_tokens
    kept = _kept(length, FORM)
    copies_entries: tl.constexpr = FORM.window_size == 0 and FORM.entry_page_size == 1 and v2p is None
    last_column = end if copies_entries else 0  # `_load_slots` checks columns itself
    if (first >= 0) & (end <= kept) & (last_column <= row_width) & (list_start + end <= capacity):
        if copies_entries:
            tl.store(target, tl.load(row + token))
        else:
            tl.store(target, _load_slots(row, row_width, v2p, _position(token, length, FORM), token >= 0, FORM))
    else:
        inside = (token >= 0) & (token < kept)
        slots = _load_slots(row, row_width, v2p, _position(token, length, FORM), inside, FORM)
        tl.store(target, slots, mask=inside & (list_start + token < capacity))


@triton.jit
def _drafted_slots(row, row_width, v2p, length, branch, FORM: tl.constexpr):
    """Return the K/V slots of the tokens that a branch (one of topk continuations) drafts in all steps, `[block_steps]`."""
    if FORM.page_size == 1 or FORM.topk == 1:
        start = length + branch * FORM.num_steps
    else:  # each branch continues in its own copy of the prefix's last page
        pages_per_branch = tl.cdiv(length % FORM.page_size + FORM.num_steps, FORM.page_size)
        start = length + branch * pages_per_branch * FORM.page_size
    drafted = tl.arange(0, FORM.block_steps)
    position = start + drafted
    inside = (drafted < FORM.num_steps) & (position >= 0)
    return _load_slots(row, row_width, v2p, position, inside, FORM)


@triton.jit
def _store_drafted(slots, step_row, at, step, capacity, FORM: tl.constexpr):
    """Store the K/V slots of the tokens drafted in steps 0 to `step` at the end of a list, from index `at` of `step_row` on."""
    drafted = tl.arange(0, FORM.block_steps)
    tl.store(step_row + at + drafted, slots, mask=(drafted <= step) & (at + drafted < capacity))


@triton.jit
def _write_indptr(positions, kv_indptr, num_branches, kv_indptr_stride, FORM: tl.constexpr):
    """Write the ends of all K/V lists to kv_indptr. `positions` [num_branches] has the prefix length of each branch."""
    NUM_STEPS: tl.constexpr = FORM.num_steps
    lanes = tl.arange(0, FORM.block_requests)
    before = tl.zeros([], tl.int64)
    for start in range(0, num_branches, FORM.block_requests):
        branch = start + lanes
        inside = branch < num_branches
        prefix = _kept(tl.load(positions + branch, mask=inside, other=0).to(tl.int64), FORM)
        end = before + tl.cumsum(prefix)
        for step in tl.static_range(NUM_STEPS):
            boundary = end + (branch + 1) * (step + 1)
            tl.store(kv_indptr + step * kv_indptr_stride + branch + 1, boundary, mask=inside)
        before += tl.sum(prefix)


@triton.jit
def _sum_before(lengths, end, FORM: tl.constexpr):
    """Return the number of prefix tokens in the K/V lists of the first `end` prefixes, int64."""
    BLOCK: tl.constexpr = FORM.block_requests
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, end, BLOCK):
        total += _kept(tl.load(lengths + start + lanes, mask=start + lanes < end, other=0).to(tl.int64), FORM)
    return tl.sum(total)
