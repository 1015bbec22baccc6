"""The entries of K and V that each request of a call reads: the keys that its rows may see.

A *place* is the index of an entry in its pool: page * page_size + offset in the page, or the index of a key of a ragged call.
The keys of a request are in the order of its page table. If rows select entries, the keys of a request are the entries that at
least one of its rows selects, each once, sorted by place. For a block-sparse problem, call these functions with each problem of
`PagedAttention.of_kv_heads`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.calls.problem import AttentionProblem, PagedAttention


def live_cells(problem: PagedAttention) -> Tensor:
    """Return a bool mask [batch_size, columns] of the page table: True for each page that the call reads. In a sparse call,
    return a mask [num_rows, num_columns] of `problem.selected`: True for each cache entry that the call reads.
    """
    if problem.selected is not None:
        return problem.columns_in_use() & (problem.selected >= 0)
    pages = -(-problem.seq_lens.to(torch.int64) // problem.page_size)
    return torch.arange(problem.k_block_tables.shape[1], device=pages.device) < pages.unsqueeze(1)


def entries_first(cells: Tensor) -> Tensor:
    """Return `cells`, cache entries [num_rows, num_columns], in their order, except that negative ones are last in each row."""
    return cells.gather(1, (cells < 0).to(torch.int8).argsort(dim=1, stable=True))


def num_keys(problem: AttentionProblem) -> list[int]:
    if not isinstance(problem, PagedAttention) or problem.selected is None:
        return problem.kv_lens()
    return [len(places) for places, _ in selections_of(problem, range(problem.batch_size))]


def keys_per_offset(problem: AttentionProblem) -> int:
    """Return the number of keys per unit of `problem.cu_seqlens_kv`: `page_size` if it counts pages; 1 for keys, or if None."""
    offsets = problem.cu_seqlens_kv
    if offsets is None or not isinstance(problem, PagedAttention) or int(offsets[-1]) == sum(problem.kv_lens()):
        return 1
    return problem.page_size


def places_of(problem: AttentionProblem, requests: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return (indices in K's pool, indices in V's pool) of key number `keys[i]` of request `requests[i]`, for each i. An index
    is page * page_size + offset in the page, or the token's number in contiguous K/V. All tensors are int64 of the same shape.
    """
    if not isinstance(problem, PagedAttention):
        assert problem.cu_seqlens_kv is not None
        found = problem.cu_seqlens_kv[requests] + keys
        return found, found
    if problem.selected is not None:
        places = [places for places, _ in selections_of(problem, range(problem.batch_size))]
        starts = torch.tensor([0, *map(len, places)], device=keys.device).cumsum(0)
        found = torch.cat(places)[starts[requests] + keys]
        return found, found
    size = problem.page_size
    k, v = (
        table[requests, keys // size].long() * size + keys % size
        for table in (problem.k_block_tables, problem.v_block_tables)
    )
    return k, v


def places_of_requests(problem: AttentionProblem, requests: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return one tuple per request: (indices of its keys in K's pool, in V's pool), both int64 [num_keys]. An index is page *
    page_size + offset in the page, or the token's number in contiguous K/V.
    """
    device, counts = problem.query.device, num_keys(problem)
    lens = torch.tensor([counts[request] for request in requests], dtype=torch.int64)
    of_keys = torch.tensor(list(requests), dtype=torch.int64).repeat_interleave(lens)
    keys = torch.arange(len(of_keys)) - (lens.cumsum(0) - lens).repeat_interleave(lens)
    k, v = places_of(problem, of_keys.to(device), keys.to(device))
    return list(zip(k.split(lens.tolist()), v.split(lens.tolist()), strict=True))


def selections_of(problem: PagedAttention, requests: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return (places, indices) for each of the `requests` of a sparse call. `places`, int64 [num_keys], are the pool indices of
    the entries that at least one row of the request selects, each once, sorted. `indices`, int64 [q_len, num_columns], says for
    each row and column which element of `places` is selected; -1: none.
    """
    assert problem.selected is not None
    offsets, found = problem.row_offsets(), []
    cells = torch.where(problem.columns_in_use(), problem.selected, -1).to(torch.int64)
    for request in requests:
        rows = cells[offsets[request] : offsets[request + 1]]
        places = rows[rows >= 0].unique()
        found.append((places, torch.where(rows >= 0, torch.searchsorted(places, rows), -1)))
    return found
