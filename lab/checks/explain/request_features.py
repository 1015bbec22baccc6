"""Read the features of each request and of the batch: from the lengths, such as `kv_len`, and from the arguments of a call."""

import math
import operator
from collections.abc import Iterator, Sequence

from lab.calls import PagedAttention, Problem
from lab.checks.explain.entry_features import read_selections
from lab.checks.explain.feature import LOADED_COLUMNS, Read
from lab.checks.explain.features import ROW_BLOCKS, ROW_TILES, TILES, WINDOW_TILES

TILE = 64  # keys that many kernels load at a time


def read_requests(
    kv_lens: Sequence[int], q_lens: Sequence[int], page_size: int, window_left: int, group: int
) -> list[Read]:
    of_rows = zip(q_lens, read_earlier(kv_lens, q_lens, group), strict=True)
    return [read_request(at, kv_lens, q_len, page_size, window_left) | read for at, (q_len, read) in enumerate(of_rows)]


def read_request(request: int, kv_lens: Sequence[int], q_len: int, page_size: int, window_left: int) -> Read:
    kv_len = kv_lens[request]
    # Index of the first key in the window of the request's last row, and of its first row; 0 or less if no key is hidden
    last_seen = kv_len - 1 - window_left if window_left >= 0 else 0
    first_seen = last_seen - q_len + 1 if window_left >= 0 else 0
    firsts = range(first_seen, first_seen + min(q_len, page_size))
    first_row = max(kv_len - q_len, 0)
    return {
        "kv_len": kv_len,
        "num_entries": kv_len,  # unless the rows select entries
        "q_len": q_len,
        "pages": -(-kv_len // page_size),
        "request": request + 1,
        "first_request": request == 0,
        "last_request": request == len(kv_lens) - 1,
        "partial_page": kv_len % page_size > 0,
        "full_page": kv_len > 0 and kv_len % page_size == 0,
        "new_page": kv_len > 1 and kv_len % page_size == 1,
        **{f"multiple_of_{keys}_keys": kv_len > 0 and kv_len % keys == 0 for keys in TILES},
        **{f"new_tile_of_{keys}": kv_len > 1 and kv_len % keys == 1 for keys in TILES},
        "no_keys": kv_len == 0,
        "no_rows": q_len == 0,
        "fewer_keys": kv_len < q_len,
        "rows_before_keys": 0 < kv_len < q_len,
        "no_prefix": kv_len == q_len,
        "prefix": kv_len > q_len > 0,
        "rows_in_page": q_len > 0 and first_row % page_size > 0,
        "rows_reach_page": first_row > 0 and -(-kv_len // page_size) > -(-first_row // page_size),
        "rows_in_pages": q_len > 0 and first_row // page_size < (kv_len - 1) // page_size,
        **{f"rows_in_tiles_of_{keys}": q_len > 0 and first_row // keys < (kv_len - 1) // keys for keys in ROW_TILES},
        "q_len_no_power_of_2": q_len & (q_len - 1) > 0,
        "multiple_of_16_rows": q_len > 0 and q_len % 16 == 0,
        "hidden_keys": last_seen > 0,
        "hidden_page": first_seen >= page_size,
        "hidden_tile": first_seen >= TILE,
        **{f"hidden_tile_of_{keys}": last_seen >= keys for keys in TILES},
        "hidden_rows": 0 <= window_left < q_len - 1,
        **{f"windows_in_tiles_of_{keys}": last_seen // keys > max(first_seen, 0) // keys for keys in WINDOW_TILES},
        "window_in_page": last_seen > 0 and any(max(first, 0) % page_size for first in firsts),
        "window_at_page_end": first_seen > 0 and (first_seen + 1) % page_size == 0,
        "first_window_with_page": first_seen > 0 and first_seen % page_size == 0,
        "window_with_page": last_seen // page_size * page_size >= max(first_seen, 1),
        "as_long_as_previous": request > 0 and kv_lens[request - 1] == kv_len,
        "after_longer": request > 0 and kv_lens[request - 1] > kv_len,
        "after_no_keys": request > 0 and kv_lens[request - 1] == 0,
        "before_no_keys": 0 in kv_lens[request + 1 : request + 2],
    }


def read_earlier(kv_lens: Sequence[int], q_lens: Sequence[int], group: int) -> Iterator[Read]:
    """Yield each request's features that compare it with its batch. `group`: query heads per K/V head, 0 if it is unknown."""
    most, fewest_rows, fewest_keys = max(q_lens, default=0), math.inf, math.inf  # the fewest of earlier requests
    longest, num_rows, blocks = max(kv_lens, default=0), sum(q_lens), dict.fromkeys(ROW_BLOCKS, 0)
    for request, (kv_len, q_len) in enumerate(zip(kv_lens, q_lens, strict=True)):
        blocks = {rows: count + -(-q_len // rows) for rows, count in blocks.items()}
        yield {
            "packed_rows": q_len * group if group else None,
            "fewer_rows": q_len < most,
            "after_fewer_rows": fewest_rows < most,
            "after_no_rows": fewest_rows == 0,
            "after_inner_no_rows": 0 in q_lens[1:request],
            "after_unread_keys": request > 0 and kv_lens[request - 1] > q_lens[request - 1] == 0,
            "after_shorter": fewest_keys < kv_len,
            "after_empty": 0 in (fewest_rows, fewest_keys),
            "shorter": kv_len < longest,
            "fewer_tiles": -(-kv_len // TILE) < -(-longest // TILE),
            **{f"late_block_of_{rows}": q_len > 0 and count > -(-num_rows // rows) for rows, count in blocks.items()},
        }
        fewest_rows, fewest_keys = min(fewest_rows, q_len), min(fewest_keys, kv_len)


def read_batch(kv_lens: Sequence[int], q_lens: Sequence[int], page_size: int, window_left: int) -> Read:
    return {
        "page_size": page_size,
        "has_window": window_left >= 0,
        "window_left": window_left if window_left >= 0 else None,
        "requests": len(kv_lens),
        "rows_of_batch": sum(q_lens),
        "longest_kv_len": max(kv_lens, default=0),
        "no_more_rows_than_requests": sum(q_lens) <= len(q_lens),
        "mixed_prefixes": len(set(map(operator.gt, kv_lens, q_lens))) > 1,
        "unequal_q_lens": len(set(q_lens)) > 1,
        "first_no_prefix": len(kv_lens) > 0 and kv_lens[0] == q_lens[0],
        "unequal_kv_lens": len(set(kv_lens)) > 1,
        "not_descending": any(map(operator.lt, kv_lens, kv_lens[1:])),
        "some_no_keys": 0 in kv_lens,
        "all_no_keys": not any(kv_lens),
        "some_no_rows": 0 in q_lens and any(q_lens),
        "some_empty": 0 in (*kv_lens, *q_lens),
    }


def read_bounds(
    problem: Problem, kv_lens: Sequence[int], q_lens: Sequence[int], block_sizes: Sequence[int]
) -> Iterator[Read]:
    """Yield for each request the features of its place in a call. `block_sizes`: rows, keys of a block with one scale, or 0."""
    visible, first_row, first_key = getattr(problem, "num_visible", None), 0, 0
    for kv_len, q_len in zip(kv_lens, q_lens, strict=True):
        is_unseen = visible is not None and bool((visible[first_row : first_row + q_len] == 0).any())
        yield {
            "at_kv_bound": kv_len == problem.max_kv_len,
            "fewer_rows_than_bound": 0 < q_len < problem.max_q_len,
            "unseen_keys": kv_len > 0 and is_unseen,
            "no_key_seen": is_unseen or kv_len == 0 < q_len or (problem.causal and kv_len < q_len),
            **{
                name: size > 0 and first % size > 0
                for name, first, size in zip(
                    ("rows_in_block", "keys_in_block"), (first_row, first_key), block_sizes, strict=False
                )
            },
        }
        first_row, first_key = first_row + q_len, first_key + kv_len


def read_pages(problem: PagedAttention, kv_lens: Sequence[int], page_size: int) -> list[Read]:
    """Return for each request the features of its pages such as `largest_page` or, in a sparse call, of the K/V entries that
    its rows select. Return [] if each K/V head has its own page table.
    """
    if problem.selected is not None:
        return [*read_selections(problem, problem.selected, kv_lens)]
    if problem.k_block_tables.dim() > 2:
        return []
    tables = problem.k_block_tables.tolist()
    used = [row[: -(-kv_len // page_size)] for row, kv_len in zip(tables, kv_lens, strict=True)]
    width, stride = problem.k_block_tables.shape[-1], problem.k_block_tables.stride(0)
    return [
        {"largest_page": max(pages, default=None), "at_table_end": len(pages) == width}
        | {"table_row_apart": request * stride % LOADED_COLUMNS > 0}
        for request, pages in enumerate(used)
    ]
