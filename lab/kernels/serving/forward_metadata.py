"""Attention metadata of one or several forward passes, of any forward mode, in one Triton launch that a CUDA graph can capture.

Glossary:

* pass: one forward pass of a model. All passes of a launch have the same requests; each has its own tables and lengths.
* slot: the index of a token in a K/V pool. `req_to_token` maps a position of a request to a slot. Page p of a pool has the
  slots from `p * page_size` on.
* full pool, sliding-window pool: the two pools of a hybrid model. `full_to_swa` maps slots of the first to slots of the second.
* write location: the slot to which a query row's new key and value are written.
* live column: a column of a page table that holds a page of the request. Columns after the live ones are not written.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.calls.arguments import check_int, check_tensor, check_vector
from lab.calls.entry import made_at_once
from lab.kernels.serving.arguments import CUMULATIVE_ROWS, INDEX_DTYPES, PRESET_ROWS, check_matrix
from lab.kernels.support import refuse_without_triton

BLOCK_COLUMNS = 256  # columns of a page table, or write locations, that a program writes at a time
# Largest number of programs that write page tables, before it is rounded up to a multiple of the requests
# (results/nvidia-h200/kernels.md, "Metadata kernels").
MAX_PROGRAMS = 512
BLOCK_REQUESTS = 256  # requests whose lengths a program sums at a time


@dataclass(frozen=True, eq=False)
class PassBuffers:
    """The output buffers of a launch for one forward pass, and three inputs. A buffer that is None is not written.

    Attributes:
        cache_seqlens: ``[num_requests]`` int32; becomes ``seq_lens + seq_len_offset``.
        cu_seqlens_k: ``[num_requests + 1]`` int32 or None; becomes 0, then the running sum of ``cache_seqlens``.
        cu_seqlens_q: ``[num_requests + 1]`` int32 or None; becomes 0, then the running sum of ``query_rows``.
        page_table: ``[num_requests, width]`` int32 with contiguous rows, or None. The first ``min(width, ceil(cache_seqlens /
            page_size))`` columns of a row are live and written. Several passes may have the same table: the largest
            ``seq_len_offset`` then determines the live columns.
        swa_page_table: like ``page_table``, with pages of the sliding-window pool, or None.
        out_cache_loc: read: ``[at most num_tokens]`` int64, the write locations of the query rows in the full pool; None if
            ``swa_out_cache_loc`` is None.
        swa_out_cache_loc: ``[num_tokens]`` int64 or None; becomes the sliding-window slots of the locations in
            ``out_cache_loc``, then 0 to its end. A location of -1 stays -1.
        seq_len_offset: read: tokens of each request that ``seq_lens`` does not count, 0 or more.
        query_rows: read: the number of query rows, an int of 1 or more for all requests, or a tensor ``[num_requests]`` int32
            or int64. None: ``cu_seqlens_q`` is not written.
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


def prepare_write_forward_metadata(
    passes: Sequence[PassBuffers],
    *,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    page_size: int,
    full_to_swa: Tensor | None = None,
    v2p: Tensor | None = None,
) -> Callable[[], None]:
    """Return a function that writes the attention metadata of one or several forward passes over the same requests in one
    Triton launch: lengths, their running sums, and page tables. A CUDA graph can capture the launch.

    In a pass, request i has ``cache_seqlens[i]`` = ``seq_lens[i] + seq_len_offset`` tokens. If this number is below 0,
    ``cu_seqlens_k`` still adds it. In row i of a page table, each column c with c * page_size < ``cache_seqlens[i]`` becomes
    ``req_to_token[req_pool_indices[i], c * page_size] // page_size``. For the sliding-window pool, ``full_to_swa`` first maps
    the slot to a slot of that pool. A slot of -1 is in page -1 of both pools. If ``v2p`` is given, it maps each page of the
    full pool's table to its physical page, or to 0 if it has none. Other columns, and columns beyond a row of ``req_to_token``,
    are not written.

    Triton compiles another kernel for another page size, dtype, number of passes, set of tensors that are None, sharing of
    tables, ``seq_len_offset`` or ``query_rows``, but not for another number of requests or write locations, length, width or
    address.

    Args:
        passes: the buffers to write, one `PassBuffers` per pass.
        req_pool_indices: ``[num_requests]`` int32 or int64, each request's row of ``req_to_token``.
        seq_lens: ``[num_requests]`` int32 or int64, tokens of each request.
        req_to_token: ``[num_rows, row_width]`` int32, the slot at each position of a request, in contiguous rows.
        page_size: tokens per page.
        full_to_swa: ``[num_slots]`` int64, the sliding-window slot of each slot of the full pool. It may be None if no pass has
            a sliding-window tensor.
        v2p: ``[num_virtual_pages]`` int64, each virtual page's physical page, below 0 for none; None if slots are physical.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, stride or device, a number is too small, or ``full_to_swa`` or one of a
            pair of write locations is missing.
        NotImplementedError: Triton does not run on the device of ``seq_lens``.
    """
    num_requests = check_tensor("seq_lens", seq_lens).numel()
    check_vector("seq_lens", seq_lens, num_requests, INDEX_DTYPES)
    check_vector("req_pool_indices", req_pool_indices, num_requests, INDEX_DTYPES)
    check_int("page_size", page_size, 1, "it is the number of tokens per page")
    check_matrix("req_to_token", req_to_token, (torch.int32,))
    for each in passes:
        _check_pass(each, num_requests, full_to_swa)
    if v2p is not None:
        check_vector("v2p", v2p, check_tensor("v2p", v2p).numel(), (torch.int64,))
    _check_devices(passes, req_pool_indices, seq_lens, req_to_token, full_to_swa, v2p)
    refuse_without_triton(seq_lens.device)
    if num_requests == 0:
        return functools.partial(_write_empty_batch, passes)
    launch = _bind_kernel(passes, req_pool_indices, seq_lens, req_to_token, page_size, full_to_swa, v2p)

    return functools.partial(_launch_on_device_of, seq_lens, launch, tuple(passes))


write_forward_metadata = made_at_once(prepare_write_forward_metadata)


def _launch_on_device_of(tensor: Tensor, launch: Callable[[], object], _passes: Sequence[PassBuffers]) -> None:
    # The kernel has only the addresses of the buffers: the argument `_passes` keeps the buffers alive.
    with torch.cuda.device_of(tensor):  # Triton launches on the current device
        launch()


def _bind_kernel(
    passes: Sequence[PassBuffers],
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    page_size: int,
    full_to_swa: Tensor | None,
    v2p: Tensor | None,
) -> Callable[[], Any]:
    from lab.kernels.serving.forward_metadata_kernel import _metadata_kernel  # imports Triton, which the judge may lack

    num_requests = seq_lens.numel()
    tables, table_offsets = _distinct_tables([(each.page_table, each.seq_len_offset) for each in passes])
    swa_tables, swa_table_offsets = _distinct_tables([(each.swa_page_table, each.seq_len_offset) for each in passes])
    full_locations = [each.out_cache_loc for each in passes if each.out_cache_loc is not None]
    swa_locations = [each.swa_out_cache_loc for each in passes if each.swa_out_cache_loc is not None]
    programs_per_row, location_rows = _grid(num_requests, tables + swa_tables, swa_locations)
    query_lens = [each.query_rows if isinstance(each.query_rows, Tensor) else None for each in passes]
    return functools.partial(
        _metadata_kernel[(programs_per_row, num_requests + 1 + location_rows)],
        req_pool_indices,
        seq_lens,
        req_to_token,
        full_to_swa,
        v2p,
        num_requests,
        req_to_token.shape[1],
        req_to_token.stride(0),
        (
            _encode([each.cache_seqlens for each in passes]),
            _encode([each.cu_seqlens_k for each in passes]),
            _encode([each.cu_seqlens_q for each in passes]),
            _encode(query_lens),
        ),
        _encode_tables(tables),
        _encode_tables(swa_tables),
        (
            _encode(full_locations),
            _encode([len(each) for each in full_locations]),
            _encode(swa_locations),
            _encode([len(each) for each in swa_locations]),
        ),
        OFFSETS=tuple(each.seq_len_offset for each in passes),
        QUERY_ROWS=tuple(_query_rows_constant(each) for each in passes),
        WIDE_QUERY_LENS=tuple(lens is not None and lens.dtype == torch.int64 for lens in query_lens),
        TABLE_OFFSETS=table_offsets,
        SWA_TABLE_OFFSETS=swa_table_offsets,
        PAGE_SIZE=page_size,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        BLOCK_REQUESTS=BLOCK_REQUESTS,
    )


def _write_empty_batch(passes: Sequence[PassBuffers]) -> None:
    for each in passes:
        cu_seqlens_q = None if _query_rows_constant(each) == PRESET_ROWS else each.cu_seqlens_q
        for tensor in (each.cu_seqlens_k, cu_seqlens_q, each.swa_out_cache_loc):
            if tensor is not None:
                tensor.zero_()


def _query_rows_constant(buffers: PassBuffers) -> int:
    if buffers.query_rows is None or buffers.cu_seqlens_q is None:
        return PRESET_ROWS
    return CUMULATIVE_ROWS if isinstance(buffers.query_rows, Tensor) else buffers.query_rows


def _encode(values: Sequence[Tensor | int | None]) -> tuple[int | None, ...]:
    """Return 2 n + 3 for each number or tensor address n, so that Triton does not compile the kernel again for the value 1 or
    multiples of 16: its option `do_not_specialize` does not apply inside a tuple. The kernel decodes (`_number`).
    """
    numbers = [each.data_ptr() if isinstance(each, Tensor) else each for each in values]
    return tuple(None if each is None else 2 * each + 3 for each in numbers)


def _encode_tables(tables: Sequence[Tensor]) -> tuple[tuple[int | None, ...], ...]:
    widths, strides = [table.shape[1] for table in tables], [table.stride(0) for table in tables]
    return _encode(tables), _encode(widths), _encode(strides)


def _distinct_tables(tables: Sequence[tuple[Tensor | None, int]]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the distinct tables of (page table or None, seq_len_offset) pairs, and the largest offset of each table."""
    found: dict[tuple[int, int, int], tuple[Tensor, int]] = {}
    for table, offset in tables:
        if table is not None:
            # The width is part of the key: a slice of a table's first columns is another table.
            key = (table.data_ptr(), table.stride(0), table.shape[1])
            found[key] = (table, max(offset, found[key][1]) if key in found else offset)
    return tuple(table for table, _ in found.values()), tuple(offset for _, offset in found.values())


def _grid(num_requests: int, tables: Sequence[Tensor], swa_locations: Sequence[Tensor]) -> tuple[int, int]:
    """Return (programs in a row of the grid, grid rows for write locations). The grid has one row for all lengths, then a row
    for the pages of each request, then the rows for write locations.
    """
    columns = max((table.shape[1] for table in tables), default=1)
    column_blocks = -(-columns // BLOCK_COLUMNS)
    programs_per_row = max(1, min(column_blocks, -(-MAX_PROGRAMS // num_requests)))
    location_blocks = -(-max(map(len, swa_locations), default=0) // BLOCK_COLUMNS)
    return programs_per_row, -(-location_blocks // programs_per_row)


def _check_pass(buffers: PassBuffers, num_requests: int, full_to_swa: Tensor | None) -> None:
    check_int("seq_len_offset", buffers.seq_len_offset, 0, "it is the number of tokens that seq_lens does not count")
    check_vector("cache_seqlens", buffers.cache_seqlens, num_requests, (torch.int32,))
    for name in ("cu_seqlens_k", "cu_seqlens_q"):
        if getattr(buffers, name) is not None:
            check_vector(name, getattr(buffers, name), num_requests + 1, (torch.int32,))
    for name in ("page_table", "swa_page_table"):
        table = getattr(buffers, name)
        if table is not None:
            check_matrix(name, table, (torch.int32,))
            if table.shape[0] != num_requests:
                raise ValueError(
                    f"{name} must have a row for each of the {num_requests} requests, got {table.shape[0]} rows"
                )
    if isinstance(buffers.query_rows, Tensor):
        check_vector("query_rows", buffers.query_rows, num_requests, INDEX_DTYPES)
    elif buffers.query_rows is not None:
        remedy = "it is the number of query rows of every request; pass None to leave cu_seqlens_q as it is"
        check_int("query_rows", buffers.query_rows, 1, remedy)
    for name in ("out_cache_loc", "swa_out_cache_loc"):
        tensor = getattr(buffers, name)
        if tensor is not None:
            check_vector(name, tensor, check_tensor(name, tensor).numel(), (torch.int64,))
    if (buffers.out_cache_loc is None) != (buffers.swa_out_cache_loc is None):
        missing = "out_cache_loc" if buffers.out_cache_loc is None else "swa_out_cache_loc"
        raise ValueError(
            f"out_cache_loc and swa_out_cache_loc go together, but {missing} is None: pass both or neither"
        )
    num_full, num_swa = (
        0 if each is None else len(each) for each in (buffers.out_cache_loc, buffers.swa_out_cache_loc)
    )
    if num_full > num_swa:
        raise ValueError(
            f"out_cache_loc has {num_full} slots, more than the {num_swa} rows of swa_out_cache_loc: allocate at least "
            f"{num_full}"
        )
    if full_to_swa is None and (buffers.swa_page_table is not None or buffers.swa_out_cache_loc is not None):
        written = "swa_page_table" if buffers.swa_page_table is not None else "swa_out_cache_loc"
        raise ValueError(
            f"{written} needs full_to_swa, the pool's map to sliding-window slots, but full_to_swa is None"
        )
    if full_to_swa is not None:
        check_vector("full_to_swa", full_to_swa, check_tensor("full_to_swa", full_to_swa).numel(), (torch.int64,))


def _check_devices(passes: Sequence[PassBuffers], *tensors: Tensor | None) -> None:
    of_passes = [value for each in passes for value in vars(each).values() if isinstance(value, Tensor)]
    devices = {tensor.device for tensor in (*tensors, *of_passes) if tensor is not None}
    if len(devices) > 1:
        raise ValueError(
            f"the passes' tensors and the arguments are on {', '.join(sorted(map(str, devices)))}: put them on one device"
        )
