"""Read the features of each request and of the batch: from the lengths, such as `kv_len`, and from the arguments of a call."""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence

from lab.calls import PagedAttention, Problem
from lab.checks.explain.entry_features import read_selections
from lab.checks.explain.feature import LOADED_COLUMNS, Features, Read
from lab.checks.explain.features import ROW_BLOCKS, ROW_TILES, TILES, WINDOW_TILES

TILE = 64  # keys that many kernels load at a time


def read_requests(
    kv_lens: Sequence[int], q_lens: Sequence[int], page_size: int, window_left: int, sizes: Features
) -> list[Read]:
    """Return each request's features. `sizes` has the features of the call, such as "group"."""
    of_rows = zip(q_lens, read_earlier(kv_lens, q_lens, sizes), strict=True)
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
        "prefix_len": first_row,
        "previous_kv_len": kv_lens[request - 1] if request else None,
        "request": request + 1,
        "first_request": request == 0,
        "last_request": request == len(kv_lens) - 1,
        "partial_page": kv_len % page_size > 0,
        "no_keys": kv_len == 0,
        "no_rows": q_len == 0,
        "fewer_keys": kv_len < q_len,
        "rows_before_keys": 0 < kv_len < q_len,
        "no_prefix": kv_len == q_len,
        "prefix": kv_len > q_len > 0,
        "rows_reach_page": first_row > 0 and -(-kv_len // page_size) > -(-first_row // page_size),
        "rows_in_pages": q_len > 0 and first_row // page_size < (kv_len - 1) // page_size,
        **{f"rows_in_tiles_of_{keys}": q_len > 0 and first_row // keys < (kv_len - 1) // keys for keys in ROW_TILES},
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
        "after_no_keys": request > 0 and kv_lens[request - 1] == 0,
        "before_no_keys": 0 in kv_lens[request + 1 : request + 2],
    }


def read_earlier(kv_lens: Sequence[int], q_lens: Sequence[int], sizes: Features) -> Iterator[Read]:
    """Yield each request's features that compare it with its batch."""
    names = ("group", "num_kv_heads", "sage_rows", "sage_keys")
    group, num_kv_heads, block_rows, block_keys = (int(sizes.get(name, 0)) for name in names)
    most, fewest_rows, fewest_keys = max(q_lens, default=0), math.inf, math.inf  # the fewest of earlier requests
    rows, keys = 0, 0
    longest, num_rows, blocks = max(kv_lens, default=0), sum(q_lens), dict.fromkeys(ROW_BLOCKS, 0)
    for request, (kv_len, q_len) in enumerate(zip(kv_lens, q_lens, strict=True)):
        blocks = {size: count + -(-q_len // size) for size, count in blocks.items()}
        yield {
            "packed_rows": q_len * group if group else None,
            "work_items": (request + 1) * num_kv_heads or None,
            "rows_so_far": rows + q_len,
            "rows_before": rows,
            "keys_before": keys,
            "rows_in_block": block_rows > 0 and rows % block_rows > 0,
            "keys_in_block": block_keys > 0 and keys % block_keys > 0,
            "previous_q_len": q_lens[request - 1] if request else None,
            "after_fewer_rows": fewest_rows < most,
            "after_no_rows": fewest_rows == 0,
            "after_inner_no_rows": 0 in q_lens[1:request],
            "after_unread_keys": request > 0 and kv_lens[request - 1] > q_lens[request - 1] == 0,
            "after_shorter": fewest_keys < kv_len,
            "after_empty": 0 in (fewest_rows, fewest_keys),
            "fewer_tiles": -(-kv_len // TILE) < -(-longest // TILE),
            **{f"late_block_of_{size}": q_len > 0 and count > -(-num_rows // size) for size, count in blocks.items()},
        }
        fewest_rows, fewest_keys, keys = min(fewest_rows, q_len), min(fewest_keys, kv_len), keys + kv_len
        rows += q_len


def read_batch(kv_lens: Sequence[int], q_lens: Sequence[int], page_size: int, window_left: int) -> Read:
    return {
        "page_size": page_size,
        "has_window": window_left >= 0,
        "window_left": window_left if window_left >= 0 else None,
        "requests": len(kv_lens),
        "rows_of_batch": sum(q_lens),
        "longest_kv_len": max(kv_lens, default=0),
        "most_q_len": max(q_lens, default=0),
        "first_kv_len": kv_lens[0] if kv_lens else None,
        "first_pages": -(-kv_lens[0] // page_size) if kv_lens else None,
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


def read_bounds(problem: Problem, kv_lens: Sequence[int], q_lens: Sequence[int]) -> Iterator[Read]:
    """Yield for each request the features that compare it with the call's bounds, and whether its rows see keys."""
    visible, first_row = getattr(problem, "num_visible", None), 0
    for kv_len, q_len in zip(kv_lens, q_lens, strict=True):
        is_unseen = visible is not None and bool((visible[first_row : first_row + q_len] == 0).any())
        yield {
            "at_kv_bound": kv_len == problem.max_kv_len,
            "fewer_rows_than_bound": 0 < q_len < problem.max_q_len,
            "unseen_keys": kv_len > 0 and is_unseen,
            "no_key_seen": is_unseen or kv_len == 0 < q_len or (problem.causal and kv_len < q_len),
        }
        first_row += q_len


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
    stride = problem.k_block_tables.stride(0)
    found, earlier = list[Read](), set[int]()
    for request, pages in enumerate(used):
        found.append(
            {
                "largest_page": max(pages, default=None),
                "repeated_page": len({*pages}) < len(pages),
                "shared_page": not earlier.isdisjoint(pages),
                "unordered_pages": pages != sorted(pages),
                "consecutive_pages": any(page + 1 == after for page, after in itertools.pairwise(pages)),
                "table_row_apart": request * stride % LOADED_COLUMNS > 0,
            }
        )
        earlier |= {*pages}
    return found
