"""The Triton kernel of `lab.kernels.serving.forward_metadata`."""

import triton
import triton.language as tl

from lab.kernels.serving.arguments import CUMULATIVE_ROWS, PRESET_ROWS

# QUERY_ROWS of a pass: `cu_seqlens_q` stays as it was preset, or is summed from `query_rows`. Else the rows of every request.
PRESET: tl.constexpr = tl.constexpr(PRESET_ROWS)
CUMULATIVE: tl.constexpr = tl.constexpr(CUMULATIVE_ROWS)

# What varies from batch to batch must not compile again, not even for its value 1 or its multiples of 16, nor for where a
# slice starts. What is in tuples goes through `_numbers` and `_addresses` for that.
_VARYING = ["num_requests", "row_width", "row_stride"]
_UNALIGNED = ["req_pool_indices", "seq_lens", "req_to_token", "full_to_swa"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _metadata_kernel(
    req_pool_indices,
    seq_lens,
    req_to_token,
    full_to_swa,
    num_requests,
    row_width,
    row_stride,
    lengths,  # addresses of each pass's (cache_seqlens, cu_seqlens_k, cu_seqlens_q, query_rows)
    tables,  # (addresses, columns, row strides) of each distinct page table
    swa_tables,
    locations,  # (addresses of slots in the full pool, their numbers, the same of the sliding-window pool) of each pass
    OFFSETS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    WIDE_QUERY_LENS: tl.constexpr,
    TABLE_OFFSETS: tl.constexpr,
    SWA_TABLE_OFFSETS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
):
    """Write all lengths in row 0 of the programs, a request's pages in each row after it, the locations in the rest."""
    share = tl.program_id(0)
    request = tl.program_id(1) - 1
    if request < 0:
        if share == 0:
            _write_lengths(seq_lens, num_requests, lengths, OFFSETS, QUERY_ROWS, WIDE_QUERY_LENS, BLOCK_REQUESTS)
    elif request < num_requests:
        length = tl.load(seq_lens + request).to(tl.int32)
        row = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * row_stride
        pages, widths, strides = tables
        swa_pages, swa_widths, swa_strides = swa_tables
        most = 0
        for t in tl.static_range(len(pages)):
            most = tl.maximum(most, _num_pages(length + TABLE_OFFSETS[t], widths[t], PAGE_SIZE))
        for t in tl.static_range(len(swa_pages)):
            most = tl.maximum(most, _num_pages(length + SWA_TABLE_OFFSETS[t], swa_widths[t], PAGE_SIZE))
        most = tl.minimum(most, tl.cdiv(row_width, PAGE_SIZE))
        for start in range(share * BLOCK_COLUMNS, most, tl.num_programs(0) * BLOCK_COLUMNS):
            column = start + tl.arange(0, BLOCK_COLUMNS)
            slot = tl.load(row + column.to(tl.int64) * PAGE_SIZE, mask=column < most, other=0)
            for t in tl.static_range(len(pages)):
                live = tl.minimum(_num_pages(length + TABLE_OFFSETS[t], widths[t], PAGE_SIZE), most)
                cell = _int32s(pages[t]) + request.to(tl.int64) * _number(strides[t]) + column
                tl.store(cell, _page(slot, PAGE_SIZE), mask=column < live)
            if len(swa_pages) > 0:
                swa_slot = _swa_slot(full_to_swa, slot, column < most)
            for t in tl.static_range(len(swa_pages)):
                live = tl.minimum(_num_pages(length + SWA_TABLE_OFFSETS[t], swa_widths[t], PAGE_SIZE), most)
                cell = _int32s(swa_pages[t]) + request.to(tl.int64) * _number(swa_strides[t]) + column
                tl.store(cell, _page(swa_slot, PAGE_SIZE).to(tl.int32), mask=column < live)
    else:
        full_locations, num_full, swa_locations, num_swa = locations
        block = (request - num_requests) * tl.num_programs(0) + share
        at = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        for p in tl.static_range(len(swa_locations)):
            is_row = at < _number(num_full[p])
            slot = tl.load(_int64s(full_locations[p]) + at, mask=is_row, other=0)
            swa_slot = tl.where(is_row, _swa_slot(full_to_swa, slot, is_row), 0)
            tl.store(_int64s(swa_locations[p]) + at, swa_slot, mask=at < _number(num_swa[p]))


@triton.jit
def _number(passed):
    """Return the number that `_numbers` was given."""
    return (passed - 3) >> 1


@triton.jit
def _int32s(passed):
    """Return a pointer to an int32 tensor that `_addresses` was given."""
    return _number(passed).to(tl.int64).to(tl.pointer_type(tl.int32))


@triton.jit
def _int64s(passed):
    """Return a pointer to an int64 tensor that `_addresses` was given."""
    return _number(passed).to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit
def _num_pages(length, passed_width, PAGE_SIZE: tl.constexpr):
    """Return the live columns of a table row."""
    return tl.minimum(tl.cdiv(length, PAGE_SIZE), _number(passed_width))


@triton.jit
def _page(slot, PAGE_SIZE: tl.constexpr):
    """Return the page of a slot, by floor division: slot -1 is in page -1."""
    return tl.where(slot < 0, -((PAGE_SIZE - 1 - slot) // PAGE_SIZE), slot // PAGE_SIZE)


@triton.jit
def _swa_slot(full_to_swa, slot, mask):
    """Return the slot in the sliding-window pool; a slot of -1 stays -1."""
    return tl.load(full_to_swa + slot, mask=mask & (slot >= 0), other=-1)


@triton.jit
def _write_lengths(
    seq_lens,
    num_requests,
    lengths,  # of `_metadata_kernel`
    OFFSETS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    WIDE_QUERY_LENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the lengths and boundaries of every pass; the running sum of `seq_lens` is made once."""
    cache_seqlens, cu_seqlens_k, cu_seqlens_q, query_lens = lengths
    lanes = tl.arange(0, BLOCK)
    for p in tl.static_range(len(cache_seqlens)):
        if cu_seqlens_k[p] is not None:
            tl.store(_int32s(cu_seqlens_k[p]), 0)
        if QUERY_ROWS[p] != PRESET:
            tl.store(_int32s(cu_seqlens_q[p]), 0)
    before = tl.zeros([], tl.int32)
    for start in range(0, num_requests, BLOCK):
        request = start + lanes
        inside = request < num_requests
        length = tl.load(seq_lens + request, mask=inside, other=0).to(tl.int32)
        end = before + tl.cumsum(length)
        before += tl.sum(length)
        for p in tl.static_range(len(cache_seqlens)):
            tl.store(_int32s(cache_seqlens[p]) + request, length + OFFSETS[p], mask=inside)
            if cu_seqlens_k[p] is not None:
                tl.store(_int32s(cu_seqlens_k[p]) + request + 1, end + (request + 1) * OFFSETS[p], mask=inside)
            if QUERY_ROWS[p] > 0:
                tl.store(_int32s(cu_seqlens_q[p]) + request + 1, (request + 1) * QUERY_ROWS[p], mask=inside)
    for p in tl.static_range(len(cache_seqlens)):
        if QUERY_ROWS[p] == CUMULATIVE:
            lens = _int64s(query_lens[p]) if WIDE_QUERY_LENS[p] else _int32s(query_lens[p])
            _write_boundaries(lens, num_requests, _int32s(cu_seqlens_q[p]), BLOCK)


@triton.jit
def _write_boundaries(lens, num_requests, cu_seqlens, BLOCK: tl.constexpr):
    """Write boundaries 1, 2, ... of requests of `lens` rows."""
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([], tl.int32)
    for start in range(0, num_requests, BLOCK):
        request = start + lanes
        inside = request < num_requests
        length = tl.load(lens + request, mask=inside, other=0).to(tl.int32)
        tl.store(cu_seqlens + request + 1, before + tl.cumsum(length), mask=inside)
        before += tl.sum(length)
