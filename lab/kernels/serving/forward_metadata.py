"""Attention metadata of any forward mode, and of several passes at once, in one Triton launch that reads no host memory."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.calls.arguments import check_int, check_tensor, check_vector
from lab.calls.entry import made_at_once
from lab.kernels.serving.arguments import CUMULATIVE_ROWS, INDEX_DTYPES, PRESET_ROWS, check_table
from lab.kernels.support import refuse_without_triton

# Columns of a page table that a program writes at a time, and write locations.
BLOCK_COLUMNS = 256
# Most programs that the requests share. With more, more are empty (results/nvidia-h200/kernels.md, "Metadata kernels").
MOST_PROGRAMS = 512
# Requests whose lengths are summed at a time.
BLOCK_REQUESTS = 256


@dataclass(frozen=True, eq=False)
class PassBuffers:
    """One forward pass of a launch: the buffers that its metadata is written to, and what sets it apart from other passes.

    Attributes:
        cache_seqlens: ``[num_requests]`` int32, becomes ``seq_lens + seq_len_offset``.
        cu_seqlens_k: ``[num_requests + 1]`` int32, becomes 0 and the running sum of ``cache_seqlens``; or None.
        cu_seqlens_q: the same of the query rows, or None.
        page_table: ``[num_requests, width]`` int32 with contiguous rows, or None. Only the first
            ``ceil(cache_seqlens / page_size)`` columns of a row are written, at most ``width`` of them. Passes may share one:
            its pages are the same for all, and it then has those of the longest.
        swa_page_table: the same in pages of the sliding-window pool, or None.
        out_cache_loc: ``[<= num_tokens]`` int64, slots of the query rows in the full pool; with ``swa_out_cache_loc``.
        swa_out_cache_loc: ``[num_tokens]`` int64, becomes those slots in the sliding-window pool, and 0 after them; or None.
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


def prepare_write_forward_metadata(
    passes: Sequence[PassBuffers],
    *,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    page_size: int,
    full_to_swa: Tensor | None = None,
) -> Callable[[], None]:
    """Prepare to write the metadata of passes over the same requests, in place and in one launch that a CUDA graph can capture.

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

    Returns:
        The launch, to be made any number of times for the same tensors: they are checked now alone.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device, or one that belongs to another is
            missing.
        NotImplementedError: Triton does not run here.
    """
    num_requests = check_tensor("seq_lens", seq_lens).numel()
    check_vector("seq_lens", seq_lens, num_requests, INDEX_DTYPES)
    check_vector("req_pool_indices", req_pool_indices, num_requests, INDEX_DTYPES)
    check_int("page_size", page_size, 1, "it is the number of tokens per page")
    check_table("req_to_token", req_to_token, (torch.int32,))
    for each in passes:
        _check_pass(each, num_requests, full_to_swa)
    _check_devices(passes, req_pool_indices, seq_lens, req_to_token, full_to_swa)
    refuse_without_triton(seq_lens.device)
    if num_requests == 0:
        return functools.partial(_write_nothing, passes)
    launch = _launch(passes, req_pool_indices, seq_lens, req_to_token, page_size, full_to_swa)
    return functools.partial(_launch_on, seq_lens, launch, tuple(passes))


write_forward_metadata = made_at_once(prepare_write_forward_metadata)


def _launch(
    passes: Sequence[PassBuffers],
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    page_size: int,
    full_to_swa: Tensor | None,
) -> Callable[[], Any]:
    """Return the kernel's launch for checked arguments of one request or more."""
    from lab.kernels.serving.forward_metadata_kernel import _metadata_kernel  # it alone needs Triton

    num_requests = seq_lens.numel()
    tables, table_offsets = _distinct([(each.page_table, each.seq_len_offset) for each in passes])
    swa_tables, swa_offsets = _distinct([(each.swa_page_table, each.seq_len_offset) for each in passes])
    locations = [each for each in passes if each.swa_out_cache_loc is not None]
    shares, location_rows = _grid(num_requests, tables + swa_tables, locations)
    query_lens = [each.query_rows if isinstance(each.query_rows, Tensor) else None for each in passes]
    return functools.partial(
        _metadata_kernel[(shares, num_requests + 1 + location_rows)],
        req_pool_indices,
        seq_lens,
        req_to_token,
        full_to_swa,
        num_requests,
        req_to_token.shape[1],
        req_to_token.stride(0),
        (
            _addresses([each.cache_seqlens for each in passes]),
            _addresses([each.cu_seqlens_k for each in passes]),
            _addresses([each.cu_seqlens_q for each in passes]),
            _addresses(query_lens),
        ),
        _tables(tables),
        _tables(swa_tables),
        (
            _addresses([each.out_cache_loc for each in locations]),
            _numbers([_length(each.out_cache_loc) for each in locations]),
            _addresses([each.swa_out_cache_loc for each in locations]),
            _numbers([_length(each.swa_out_cache_loc) for each in locations]),
        ),
        OFFSETS=tuple(each.seq_len_offset for each in passes),
        QUERY_ROWS=tuple(_query_rows(each) for each in passes),
        WIDE_QUERY_LENS=tuple(lens is not None and lens.dtype == torch.int64 for lens in query_lens),
        TABLE_OFFSETS=table_offsets,
        SWA_TABLE_OFFSETS=swa_offsets,
        PAGE_SIZE=page_size,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        BLOCK_REQUESTS=BLOCK_REQUESTS,
    )


def _launch_on(tensor: Tensor, launch: Callable[[], Any], held: object) -> None:
    """Launch. `held` lives as long as this call can be made: the launch has the passes' addresses alone."""
    with torch.cuda.device_of(tensor):  # Triton launches on the current device
        launch()


def _write_nothing(passes: Sequence[PassBuffers]) -> None:
    """Write what there is without requests: the leading zeros, and the padding of write locations."""
    for each in passes:
        for tensor in (each.cu_seqlens_k, each.swa_out_cache_loc, each.cu_seqlens_q if _query_rows(each) else None):
            if tensor is not None:
                tensor.zero_()


def _query_rows(each: PassBuffers) -> int:
    """Return QUERY_ROWS of a pass."""
    if each.query_rows is None or each.cu_seqlens_q is None:
        return PRESET_ROWS
    return CUMULATIVE_ROWS if isinstance(each.query_rows, Tensor) else each.query_rows


def _length(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.shape[0]


# Triton compiles anew for a number in a tuple that is 1 or a multiple of 16, and for a tensor in one whose address is such a
# multiple: `do_not_specialize` does not reach into tuples. Twice a number plus 3 is neither, so that is what is passed.
def _numbers(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(2 * value + 3 for value in values)


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[int | None, ...]:
    return tuple(None if tensor is None else 2 * tensor.data_ptr() + 3 for tensor in tensors)


def _tables(tables: Sequence[Tensor]) -> tuple[tuple[int | None, ...], tuple[int, ...], tuple[int, ...]]:
    """Return what the kernel takes of tables: (addresses, columns, row strides)."""
    widths, strides = [table.shape[1] for table in tables], [table.stride(0) for table in tables]
    return _addresses(tables), _numbers(widths), _numbers(strides)


def _distinct(tables: Sequence[tuple[Tensor | None, int]]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return (each table once, the largest offset of the passes that share it)."""
    found: dict[tuple[int, int, int], tuple[Tensor, int]] = {}
    for table, offset in tables:
        if table is not None:
            # A table's first columns are a table of their own.
            key = (table.data_ptr(), table.stride(0), table.shape[1])
            found[key] = (table, max(offset, found[key][1]) if key in found else offset)
    return tuple(table for table, _ in found.values()), tuple(offset for _, offset in found.values())


def _grid(num_requests: int, tables: Sequence[Tensor], locations: Sequence[PassBuffers]) -> tuple[int, int]:
    """Return (programs per request, rows of as many programs for the write locations)."""
    columns = max((table.shape[1] for table in tables), default=1)
    shares = max(1, min(-(-columns // BLOCK_COLUMNS), -(-MOST_PROGRAMS // num_requests)))
    blocks = max((-(-_length(each.swa_out_cache_loc) // BLOCK_COLUMNS) for each in locations), default=0)
    return shares, -(-blocks // shares)


def _check_pass(each: PassBuffers, num_requests: int, full_to_swa: Tensor | None) -> None:
    check_int("seq_len_offset", each.seq_len_offset, 0, "it is the number of tokens that seq_lens does not count")
    check_vector("cache_seqlens", each.cache_seqlens, num_requests, (torch.int32,))
    for name in ("cu_seqlens_k", "cu_seqlens_q"):
        if getattr(each, name) is not None:
            check_vector(name, getattr(each, name), num_requests + 1, (torch.int32,))
    for name in ("page_table", "swa_page_table"):
        table = getattr(each, name)
        if table is not None:
            check_table(name, table, (torch.int32,))
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


def _check_devices(passes: Sequence[PassBuffers], *tensors: Tensor | None) -> None:
    written = [value for each in passes for value in vars(each).values() if isinstance(value, Tensor)]
    devices = {tensor.device for tensor in (*tensors, *written) if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"the tensors are on {', '.join(sorted(map(str, devices)))}: put them on one device")
