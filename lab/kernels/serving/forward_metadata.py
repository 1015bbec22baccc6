"""Attention metadata of any forward mode, and of several passes at once, in one Triton launch that reads no host memory."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.calls.arguments import check_int, check_tensor, check_vector, dtype_names
from lab.kernels.support import refuse_without_triton

INDEX_DTYPES = (torch.int32, torch.int64)

# Columns of a page table that a program writes at a time, and write locations.
BLOCK_COLUMNS = 256
# Programs that the requests share at most. Most are empty: 256 requests of 8,192 tokens in a table of 131,072 (page size 64)
# take 2.0 µs with 512 programs on an H200, 2.3 with 1,024 and 2.5 with 2,048; 64 of 81,920 tokens take 2.4 with all of them.
MOST_PROGRAMS = 512
# Requests whose lengths are summed at a time.
BLOCK_REQUESTS = 256
# How the rows of a pass are laid out, as the kernel is told; a positive number is the rows of every request.
_PRESET, _CUMULATIVE = 0, -1


@dataclass(frozen=True, eq=False)
class PassBuffers:
    """One forward pass of a launch: what sets it apart from the others, and where its metadata is written.

    Attributes:
        cache_seqlens: ``[num_requests]`` int32, becomes ``seq_lens + seq_len_offset``.
        cu_seqlens_k: ``[num_requests + 1]`` int32, becomes 0 and the running sum of ``cache_seqlens``; or None.
        cu_seqlens_q: the same of the query rows, or None.
        page_table: ``[num_requests, width]`` int32 with contiguous rows, or None. Only the first
            ``ceil(cache_seqlens / page_size)`` columns of a row are written, at most ``width`` of them. Passes may share one:
            its pages are the same for all, and it then has those of the longest.
        swa_page_table: the same in pages of the sliding-window pool, or None.
        out_cache_loc: ``[<= num_tokens]`` int64, slots of the query rows in the full pool; with ``swa_out_cache_loc``.
        swa_out_cache_loc: ``[num_tokens]`` int64, becomes those slots in the sliding-window pool, and 0 behind them; or None.
        seq_len_offset: tokens per request that ``seq_lens`` does not count.
        query_rows: of every request (an int), or of each (``[num_requests]`` int32 or int64); None leaves
            ``cu_seqlens_q`` as it was preset.
    """

    cache_seqlens: Tensor
    cu_seqlens_k: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    page_table: Tensor | None = None
    swa_page_table: Tensor | None = None
    out_cache_loc: Tensor | None = None
    swa_out_cache_loc: Tensor | None = None
    seq_len_offset: int = 0
    query_rows: int | Tensor | None = None


def write_forward_metadata(
    passes: Sequence[PassBuffers],
    *,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    page_size: int,
    full_to_swa: Tensor | None = None,
) -> None:
    """Write the metadata of passes over the same requests, in place and in one launch, capturable in a CUDA graph.

    Column c of a page table becomes ``req_to_token[request, c * page_size] // page_size``, through ``full_to_swa`` for the
    sliding window; a slot of -1 stays in page -1. A length of 0 or below has no pages but counts in ``cu_seqlens_k``. What is
    not live, such as a table's tail, stays as it was.

    Nothing is compiled for a number of requests or write locations, a length, a table's width, or where a slice starts. What
    is compiled for: the page size; the dtypes of ``req_pool_indices`` and ``seq_lens``; the passes, that is how many there
    are, which of their tensors are None or the same table, ``seq_len_offset``, and ``query_rows`` or its dtype.

    Args:
        passes: what to write; see `PassBuffers`.
        req_pool_indices: ``[num_requests]`` int32 or int64, rows of ``req_to_token``.
        seq_lens: ``[num_requests]`` int32 or int64, tokens of each request.
        req_to_token: ``[num_rows, row_width]`` int32, slots by position.
        page_size: tokens per page.
        full_to_swa: int64, slots of the sliding-window pool by slot of the full one; where a pass needs it.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device, or one that belongs to another is
            missing.
        NotImplementedError: Triton does not run here.
    """
    prepare_write_forward_metadata(
        passes,
        req_pool_indices=req_pool_indices,
        seq_lens=seq_lens,
        req_to_token=req_to_token,
        page_size=page_size,
        full_to_swa=full_to_swa,
    )()


def prepare_write_forward_metadata(
    passes: Sequence[PassBuffers],
    *,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    page_size: int,
    full_to_swa: Tensor | None = None,
) -> Callable[[], None]:
    """`write_forward_metadata` for the same tensors any number of times: checked now, launched by each call."""
    num_requests = check_tensor("seq_lens", seq_lens).numel()
    check_vector("seq_lens", seq_lens, num_requests, INDEX_DTYPES)
    check_vector("req_pool_indices", req_pool_indices, num_requests, INDEX_DTYPES)
    check_int("page_size", page_size, 1, "it is the number of tokens per page")
    _check_table("req_to_token", req_to_token)
    for each in passes:
        _check_pass(each, num_requests, full_to_swa)
    _check_devices(passes, req_pool_indices, seq_lens, req_to_token, full_to_swa)
    refuse_without_triton(seq_lens.device)
    if num_requests == 0:
        return functools.partial(_write_nothing, passes)

    tables, table_offsets = _distinct([(each.page_table, each.seq_len_offset) for each in passes])
    swa_tables, swa_offsets = _distinct([(each.swa_page_table, each.seq_len_offset) for each in passes])
    locations = [each for each in passes if each.swa_out_cache_loc is not None]
    shares, location_rows = _grid(num_requests, tables + swa_tables, locations)
    query_lens = [each.query_rows if isinstance(each.query_rows, Tensor) else None for each in passes]
    launch = functools.partial(
        _metadata_kernel[(shares, num_requests + 1 + location_rows)],
        req_pool_indices,
        seq_lens,
        req_to_token,
        full_to_swa,
        num_requests,
        req_to_token.shape[1],
        req_to_token.stride(0),
        _addresses([each.cache_seqlens for each in passes]),
        _addresses([each.cu_seqlens_k for each in passes]),
        _addresses([each.cu_seqlens_q for each in passes]),
        _addresses(query_lens),
        _addresses(tables),
        _numbers([table.shape[1] for table in tables]),
        _numbers([table.stride(0) for table in tables]),
        _addresses(swa_tables),
        _numbers([table.shape[1] for table in swa_tables]),
        _numbers([table.stride(0) for table in swa_tables]),
        _addresses([each.out_cache_loc for each in locations]),
        _numbers([_length(each.out_cache_loc) for each in locations]),
        _addresses([each.swa_out_cache_loc for each in locations]),
        _numbers([_length(each.swa_out_cache_loc) for each in locations]),
        OFFSETS=tuple(each.seq_len_offset for each in passes),
        QUERY_ROWS=tuple(_query_rows(each) for each in passes),
        WIDE_QUERY_LENS=tuple(lens is not None and lens.dtype == torch.int64 for lens in query_lens),
        TABLE_OFFSETS=table_offsets,
        SWA_TABLE_OFFSETS=swa_offsets,
        PAGE_SIZE=page_size,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        BLOCK_REQUESTS=BLOCK_REQUESTS,
    )
    return functools.partial(_launch_on, seq_lens, launch, tuple(passes))


def _launch_on(tensor: Tensor, launch: Callable[[], Any], held: object) -> None:
    """Launch. What is held lives as long as this call can be made: the launch has the passes' addresses alone."""
    with torch.cuda.device_of(tensor):  # Triton launches on the current device
        launch()


def _write_nothing(passes: Sequence[PassBuffers]) -> None:
    """Without requests there is nothing but the leading zeros and the padding of write locations."""
    for each in passes:
        for tensor in (each.cu_seqlens_k, each.swa_out_cache_loc, each.cu_seqlens_q if _query_rows(each) else None):
            if tensor is not None:
                tensor.zero_()


def _query_rows(each: PassBuffers) -> int:
    if each.query_rows is None or each.cu_seqlens_q is None:
        return _PRESET
    return _CUMULATIVE if isinstance(each.query_rows, Tensor) else each.query_rows


def _length(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.shape[0]


# Triton compiles anew for a number in a tuple that is 1 or a multiple of 16, and for a tensor in one whose address is such a
# multiple: `do_not_specialize` does not reach into tuples. Twice a number plus 3 is neither, so that is what is passed.
def _numbers(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(2 * value + 3 for value in values)


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[int | None, ...]:
    return tuple(None if tensor is None else 2 * tensor.data_ptr() + 3 for tensor in tensors)


def _distinct(tables: Sequence[tuple[Tensor | None, int]]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Each table once, with the largest offset of the passes that share it."""
    found: dict[tuple[int, int, int], tuple[Tensor, int]] = {}
    for table, offset in tables:
        if table is not None:
            key = (
                table.data_ptr(),
                table.stride(0),
                table.shape[1],
            )  # a table's first columns are a table of their own
            found[key] = (table, max(offset, found[key][1]) if key in found else offset)
    return tuple(table for table, _ in found.values()), tuple(offset for _, offset in found.values())


def _grid(num_requests: int, tables: Sequence[Tensor], locations: Sequence[PassBuffers]) -> tuple[int, int]:
    """Programs per request, and how many more rows of as many programs the write locations need."""
    columns = max((table.shape[1] for table in tables), default=1)
    shares = max(1, min(triton.cdiv(columns, BLOCK_COLUMNS), triton.cdiv(MOST_PROGRAMS, num_requests)))
    blocks = max((triton.cdiv(_length(each.swa_out_cache_loc), BLOCK_COLUMNS) for each in locations), default=0)
    return shares, triton.cdiv(blocks, shares)


def _check_pass(each: PassBuffers, num_requests: int, full_to_swa: Tensor | None) -> None:
    check_int("seq_len_offset", each.seq_len_offset, 0, "it is the number of tokens that seq_lens does not count")
    check_vector("cache_seqlens", each.cache_seqlens, num_requests, (torch.int32,))
    for name in ("cu_seqlens_k", "cu_seqlens_q"):
        if getattr(each, name) is not None:
            check_vector(name, getattr(each, name), num_requests + 1, (torch.int32,))
    for name in ("page_table", "swa_page_table"):
        table = getattr(each, name)
        if table is not None:
            _check_table(name, table)
            if table.shape[0] != num_requests:
                raise ValueError(
                    f"{name} must have a row for each of the {num_requests} requests, got {table.shape[0]}"
                )
    if isinstance(each.query_rows, Tensor):
        check_vector("query_rows", each.query_rows, num_requests, INDEX_DTYPES)
    elif each.query_rows is not None:
        check_int("query_rows", each.query_rows, 1, "it is the number of query rows of every request")
    _check_locations(each, full_to_swa)


def _check_locations(each: PassBuffers, full_to_swa: Tensor | None) -> None:
    for name in ("out_cache_loc", "swa_out_cache_loc"):
        tensor = getattr(each, name)
        if tensor is not None:
            check_vector(name, tensor, check_tensor(name, tensor).numel(), (torch.int64,))
    if (each.out_cache_loc is None) != (each.swa_out_cache_loc is None):
        raise ValueError("out_cache_loc and swa_out_cache_loc go together: pass both or neither")
    if _length(each.out_cache_loc) > _length(each.swa_out_cache_loc):
        raise ValueError(
            f"out_cache_loc has {_length(each.out_cache_loc)} slots, more than the {_length(each.swa_out_cache_loc)} rows of "
            "swa_out_cache_loc"
        )
    if full_to_swa is None and (each.swa_page_table is not None or each.swa_out_cache_loc is not None):
        raise ValueError("a sliding-window table or write location needs full_to_swa, the pool's map")
    if full_to_swa is not None:
        check_vector("full_to_swa", full_to_swa, check_tensor("full_to_swa", full_to_swa).numel(), (torch.int64,))


def _check_table(name: str, table: object) -> None:
    tensor = check_tensor(name, table)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} must be {dtype_names((torch.int32,))}, got {tensor.dtype}")
    if tensor.ndim != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError(
            f"{name} must have two dimensions and contiguous rows, got shape {list(tensor.shape)} with stride "
            f"{tensor.stride()}"
        )


def _check_devices(passes: Sequence[PassBuffers], *tensors: Tensor | None) -> None:
    written = [value for each in passes for value in vars(each).values() if isinstance(value, Tensor)]
    devices = {tensor.device for tensor in (*tensors, *written) if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"the tensors are on {', '.join(sorted(map(str, devices)))}: put them on one device")


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
    cache_seqlens,
    cu_seqlens_k,
    cu_seqlens_q,
    query_lens,
    tables,
    table_widths,
    table_strides,
    swa_tables,
    swa_table_widths,
    swa_table_strides,
    out_cache_locs,
    num_locations,
    swa_out_cache_locs,
    num_swa_locations,
    OFFSETS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    WIDE_QUERY_LENS: tl.constexpr,
    TABLE_OFFSETS: tl.constexpr,
    SWA_TABLE_OFFSETS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
):
    """Row 0 of the programs writes all lengths, the next rows the pages of a request each, the rest the locations."""
    share = tl.program_id(0)
    request = tl.program_id(1) - 1
    if request < 0:
        if share == 0:
            _write_lengths(
                seq_lens,
                num_requests,
                cache_seqlens,
                cu_seqlens_k,
                cu_seqlens_q,
                query_lens,
                OFFSETS,
                QUERY_ROWS,
                WIDE_QUERY_LENS,
                BLOCK_REQUESTS,
            )
    elif request < num_requests:
        length = tl.load(seq_lens + request).to(tl.int32)
        row = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * row_stride
        most = 0
        for t in tl.static_range(len(tables)):
            most = tl.maximum(most, _num_pages(length + TABLE_OFFSETS[t], table_widths[t], PAGE_SIZE))
        for t in tl.static_range(len(swa_tables)):
            most = tl.maximum(most, _num_pages(length + SWA_TABLE_OFFSETS[t], swa_table_widths[t], PAGE_SIZE))
        most = tl.minimum(most, tl.cdiv(row_width, PAGE_SIZE))
        for start in range(share * BLOCK_COLUMNS, most, tl.num_programs(0) * BLOCK_COLUMNS):
            column = start + tl.arange(0, BLOCK_COLUMNS)
            slot = tl.load(row + column.to(tl.int64) * PAGE_SIZE, mask=column < most, other=0)
            for t in tl.static_range(len(tables)):
                live = tl.minimum(_num_pages(length + TABLE_OFFSETS[t], table_widths[t], PAGE_SIZE), most)
                cell = _int32s(tables[t]) + request.to(tl.int64) * _number(table_strides[t]) + column
                tl.store(cell, _page(slot, PAGE_SIZE), mask=column < live)
            if len(swa_tables) > 0:
                swa_slot = _swa_slot(full_to_swa, slot, column < most)
            for t in tl.static_range(len(swa_tables)):
                live = tl.minimum(_num_pages(length + SWA_TABLE_OFFSETS[t], swa_table_widths[t], PAGE_SIZE), most)
                cell = _int32s(swa_tables[t]) + request.to(tl.int64) * _number(swa_table_strides[t]) + column
                tl.store(cell, _page(swa_slot, PAGE_SIZE).to(tl.int32), mask=column < live)
    else:
        block = (request - num_requests) * tl.num_programs(0) + share
        at = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        for p in tl.static_range(len(swa_out_cache_locs)):
            is_row = at < _number(num_locations[p])
            slot = tl.load(_int64s(out_cache_locs[p]) + at, mask=is_row, other=0)
            swa_slot = tl.where(is_row, _swa_slot(full_to_swa, slot, is_row), 0)
            tl.store(_int64s(swa_out_cache_locs[p]) + at, swa_slot, mask=at < _number(num_swa_locations[p]))


@triton.jit
def _number(passed):
    """What `_numbers` was given."""
    return (passed - 3) >> 1


@triton.jit
def _int32s(passed):
    """A pointer to what `_addresses` was given."""
    return _number(passed).to(tl.int64).to(tl.pointer_type(tl.int32))


@triton.jit
def _int64s(passed):
    return _number(passed).to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit
def _num_pages(length, passed_width, PAGE_SIZE: tl.constexpr):
    """Live columns of a table row."""
    return tl.minimum(tl.cdiv(length, PAGE_SIZE), _number(passed_width))


@triton.jit
def _page(slot, PAGE_SIZE: tl.constexpr):
    """Floor division: slot -1 is in page -1."""
    return tl.where(slot < 0, -((PAGE_SIZE - 1 - slot) // PAGE_SIZE), slot // PAGE_SIZE)


@triton.jit
def _swa_slot(full_to_swa, slot, mask):
    """The map's entry; a slot of -1 stays -1."""
    return tl.load(full_to_swa + slot, mask=mask & (slot >= 0), other=-1)


@triton.jit
def _write_lengths(
    seq_lens,
    num_requests,
    cache_seqlens,
    cu_seqlens_k,
    cu_seqlens_q,
    query_lens,
    OFFSETS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    WIDE_QUERY_LENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lengths and boundaries of every pass; the running sum of the lengths is made once."""
    lanes = tl.arange(0, BLOCK)
    for p in tl.static_range(len(cache_seqlens)):
        if cu_seqlens_k[p] is not None:
            tl.store(_int32s(cu_seqlens_k[p]), 0)
        if QUERY_ROWS[p] != 0:
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
        if QUERY_ROWS[p] < 0:
            lens = _int64s(query_lens[p]) if WIDE_QUERY_LENS[p] else _int32s(query_lens[p])
            _write_boundaries(lens, num_requests, _int32s(cu_seqlens_q[p]), BLOCK)


@triton.jit
def _write_boundaries(lens, num_requests, cu_seqlens, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([], tl.int32)
    for start in range(0, num_requests, BLOCK):
        request = start + lanes
        inside = request < num_requests
        length = tl.load(lens + request, mask=inside, other=0).to(tl.int32)
        tl.store(cu_seqlens + request + 1, before + tl.cumsum(length), mask=inside)
        before += tl.sum(length)
