"""The entries of K and V that each request of a call reads: the keys that its rows may see.

A *place* names an entry: page * page_size + offset in the page, or the index of a key of a ragged call. The keys of a request
are counted in the order of its page table. If rows select entries, they are the entries that at least one of its rows selects,
each once, sorted by place.

References, records and timing read a call through these functions. A block-sparse call has no keys of a request as a whole: ask
for each problem of `PagedAttention.of_kv_heads`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.calls.problem import AttentionProblem, PagedAttention


def live_cells(problem: PagedAttention) -> Tensor:
    """Return the cells of the call's tables that name a page or an entry which is read: bool [batch_size,
    max_num_pages_per_seq], or [num_rows, num_columns] if rows select entries.
    """
    if problem.selected is not None:
        return problem.columns_in_use() & (problem.selected >= 0)
    pages = -(-problem.seq_lens.to(torch.int64) // problem.page_size)
    return torch.arange(problem.k_block_tables.shape[1], device=pages.device) < pages.unsqueeze(1)


def num_keys(problem: AttentionProblem) -> list[int]:
    if not isinstance(problem, PagedAttention) or problem.selected is None:
        return problem.kv_lens()
    return [len(places) for places, _ in selections_of(problem, range(problem.batch_size))]


def keys_per_offset(problem: AttentionProblem) -> int:
    """Return how many keys the offsets `cu_seqlens_kv` of a checked problem count as one: `page_size` if they count pages, else
    1. Without offsets it is 1.
    """
    offsets = problem.cu_seqlens_kv
    if offsets is None or not isinstance(problem, PagedAttention) or int(offsets[-1]) == sum(problem.kv_lens()):
        return 1
    return problem.page_size


def places_of(problem: AttentionProblem, requests: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of keys of requests in K's pool and in V's, int64. Both tensors equal `requests`, int64, in shape;
    `keys` counts within each request.
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
    """Return the places of all keys of each of these requests, in K's pool and in V's, int64 [num_keys] each."""
    device, counts = problem.query.device, num_keys(problem)
    lens = [counts[request] for request in requests]
    of_keys = torch.tensor(list(requests), dtype=torch.int64).repeat_interleave(torch.tensor(lens, dtype=torch.int64))
    keys = torch.cat([torch.arange(0), *map(torch.arange, lens)])
    k, v = places_of(problem, of_keys.to(device), keys.to(device))
    return list(zip(k.split(lens), v.split(lens), strict=True))


def selections_of(problem: PagedAttention, requests: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the entries that the rows of requests select: their places, int64, sorted, each once; and for each row the indices
    of its entries among these places, int64 [q_len, num_columns], -1 for none. The problem must have `selected`.
    """
    assert problem.selected is not None
    offsets, found = problem.row_offsets(), []
    cells = torch.where(problem.columns_in_use(), problem.selected, -1).to(torch.int64)
    for request in requests:
        rows = cells[offsets[request] : offsets[request + 1]]
        places = rows[rows >= 0].unique()
        found.append((places, torch.where(rows >= 0, torch.searchsorted(places, rows), -1)))
    return found
