"""Read the features of the K/V entries that the query rows of each request select in a sparse call."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lab.calls import PagedAttention
from lab.calls.dsv4_decode import WINDOW_COLUMNS, TwoPools
from lab.checks.explain.feature import Read
from lab.checks.explain.features import COLUMN_BLOCKS, EMPTY_COLUMNS


def read_selections(problem: PagedAttention, columns: Tensor, kv_lens: Sequence[int]) -> Iterator[Read]:
    """Yield for each request the features of the K/V entries that its rows select: `columns` [num_rows, num_columns]."""
    given, used = columns.cpu(), problem.columns_in_use().cpu()
    selected = given.where(used, 0)
    up_to_last = _up_to_last(used)
    follows = (given >= 0) & ~up_to_last
    lens = None if problem.selected_lens is None else problem.selected_lens.cpu()
    window_cache = problem.window_cache if isinstance(problem, TwoPools) else None
    is_dsv4 = window_cache is not None
    num_pages, _, page_size = (0, 1, 0) if window_cache is None else window_cache.shape[:3]
    for request, (kv_len, (start, end)) in enumerate(zip(kv_lens, pairwise(problem.row_offsets()), strict=True)):
        is_gap, is_used = selected[start:end] < 0, used[start:end]
        is_entry = is_used & ~is_gap
        counts = is_entry.sum(dim=1)
        highest = selected[start:end].cummax(1).values
        num_columns = up_to_last[start:end].sum(dim=1)
        ordered = selected[start:end].where(is_entry, -1).sort(1).values
        keys_of_rows = torch.arange(kv_len - len(counts), kv_len) + 1
        yield {
            **dict.fromkeys(("no_entry", "no_key_seen"), (counts == 0).any()),
            "empty_tile": (~is_entry[:, :EMPTY_COLUMNS].any(dim=1)).any(),
            "gap": is_gap.any(),
            "gap_before_entry": (is_gap & _up_to_last(is_entry)).any(),
            "unordered_entries": (is_entry & (selected[start:end] < highest)).any(),
            "repeated_entry": ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(),
            "entry_after_last": follows[start:end].any(),
            "columns_differ": (num_columns != num_columns[:1]).any(),
            "unused_first_columns": (given[start:end] >= 0)[:, :EMPTY_COLUMNS][~is_used[:, :EMPTY_COLUMNS]].any(),
            **{f"empty_block_of_{size}": _has_empty_block(is_entry, size) for size in COLUMN_BLOCKS},
            "num_entries": int(counts.max()) if len(counts) else None,
            "fewest_columns": int(num_columns.min()) if len(counts) else None,
            "most_columns": int(num_columns.max()) if len(counts) else None,
            "columns_after_row": (num_columns > keys_of_rows).any(),
            "no_window_entry": is_dsv4 and (~is_entry[:, :WINDOW_COLUMNS].any(1)).any(),
            "no_compressed_entry": is_dsv4 and (~is_entry[:, WINDOW_COLUMNS:].any(1)).any(),
            "other_lens_at_request": lens is not None
            and start < end
            and (lens[start:end] != lens[min(request, len(lens) - 1)]).any(),
            **{
                name: is_dsv4 and (is_entry & (selected[start:end] >= size))[:, WINDOW_COLUMNS:].any()
                for name, size in (
                    ("entry_past_window_page", page_size),
                    ("entry_past_window_pool", num_pages * page_size),
                )
            },
        }


def _has_empty_block(is_entry: Tensor, size: int) -> bool:
    filled = torch.stack([block.any(dim=1) for block in is_entry.split(size, dim=1)], dim=1)
    return bool((~filled & _up_to_last(filled)).any())


def _up_to_last(marked: Tensor) -> Tensor:
    """Return a bool mask with the shape of `marked`: True for each column up to the last marked column of its row."""
    return marked.flip(1).cumsum(1).flip(1) > 0
