"""The Triton kernel that `lab.kernels.serving.forward_metadata` launches; the glossary there explains the terms."""

import triton
import triton.language as tl

from lab.kernels.serving.arguments import CUMULATIVE_ROWS, PRESET_ROWS

# The values of QUERY_ROWS that are not the number of query rows of every request.
PRESET: tl.constexpr = tl.constexpr(PRESET_ROWS)
CUMULATIVE: tl.constexpr = tl.constexpr(CUMULATIVE_ROWS)

# By default Triton compiles a kernel again for an integer of 1 or a multiple of 16, and for an address of a multiple of 16
# bytes. These arguments differ from batch to batch and must not compile it again. Arguments in tuples are encoded for the same
# reason (`_encode` of `forward_metadata`).
_VARYING = ["num_requests", "row_width", "row_stride"]
_UNALIGNED = ["req_pool_indices", "seq_lens", "req_to_token", "full_to_swa", "v2p"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _metadata_kernel(
    req_pool_indices,
    seq_lens,
    req_to_token,
    full_to_swa,
    v2p,  # None: slots are not virtual
    num_requests,
    row_width,  # columns of `req_to_token`
    row_stride,  # elements from one row of `req_to_token` to the next
    lengths,  # encoded addresses of (cache_seqlens, cu_seqlens_k, cu_seqlens_q, query_lens), each a tuple over passes
    tables,  # encoded (addresses, columns, row strides), each a tuple over distinct page tables
    swa_tables,  # like `tables`, of the sliding-window pool
    locations,  # encoded (out_cache_loc, its length, swa_out_cache_loc, its length), each a tuple over passes that have them
    OFFSETS: tl.constexpr,  # `seq_len_offset` of each pass
    QUERY_ROWS: tl.constexpr,  # result of `_query_rows_constant` for each pass
    WIDE_QUERY_LENS: tl.constexpr,  # True for each pass whose query_lens are int64
    TABLE_OFFSETS: tl.constexpr,  # largest `seq_len_offset` of the passes of each table
    SWA_TABLE_OFFSETS: tl.constexpr,  # the same for `swa_tables`
    PAGE_SIZE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,  # columns, or write locations, written at a time
    BLOCK_REQUESTS: tl.constexpr,  # requests whose lengths are summed at a time
):
    """Write lengths (row 0 of the grid), page tables (row 1 + i for request i) and write locations (later rows)."""
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
            page = _page(slot, PAGE_SIZE)
            if v2p is not None:
                page = tl.maximum(tl.load(v2p + page, mask=(column < most) & (page >= 0), other=0), 0).to(tl.int32)
            for t in tl.static_range(len(pages)):
                live = tl.minimum(_num_pages(length + TABLE_OFFSETS[t], widths[t], PAGE_SIZE), most)
                cell = _int32s(pages[t]) + request.to(tl.int64) * _number(strides[t]) + column
                tl.store(cell, page, mask=column < live)
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
    """Decode a number n that was passed as 2 n + 3 (`_encode`)."""
    return (passed - 3) >> 1


@triton.jit
def _int32s(passed):
    return _number(passed).to(tl.int64).to(tl.pointer_type(tl.int32))


@triton.jit
def _int64s(passed):
    return _number(passed).to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit
def _num_pages(length, passed_width, PAGE_SIZE: tl.constexpr):
    """Return the number of columns to write in a page table for `length` tokens: the pages, but at most the table's width."""
    return tl.minimum(tl.cdiv(length, PAGE_SIZE), _number(passed_width))


@triton.jit
def _page(slot, PAGE_SIZE: tl.constexpr):
    """Return floor(slot / PAGE_SIZE), the page of a slot. Slot -1 is in page -1; Triton's `//` would round to 0."""
    return tl.where(slot < 0, -((PAGE_SIZE - 1 - slot) // PAGE_SIZE), slot // PAGE_SIZE)


@triton.jit
def _swa_slot(full_to_swa, slot, mask):
    """Return the sliding-window slot of each slot of the full pool; -1 for slot -1, and where `mask` is False."""
    return tl.load(full_to_swa + slot, mask=mask & (slot >= 0), other=-1)


@triton.jit
def _write_lengths(
    seq_lens,
    num_requests,
    lengths,  # as in `_metadata_kernel`
    OFFSETS: tl.constexpr,  # as in `_metadata_kernel`, like the next two
    QUERY_ROWS: tl.constexpr,
    WIDE_QUERY_LENS: tl.constexpr,
    BLOCK: tl.constexpr,  # requests whose lengths are summed at a time
):
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
    """Write the running sum of `lens` to `cu_seqlens[1:num_requests + 1]`, BLOCK requests at a time."""
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([], tl.int32)
    for start in range(0, num_requests, BLOCK):
        request = start + lanes
        inside = request < num_requests
        length = tl.load(lens + request, mask=inside, other=0).to(tl.int32)
        tl.store(cu_seqlens + request + 1, before + tl.cumsum(length), mask=inside)
        before += tl.sum(length)
