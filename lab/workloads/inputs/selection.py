"""Draw the keys that query rows or K/V heads of sparse calls select, and compute the keys that rows see on one rank."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lab.metadata.mha.block_sparse import NUM_PAGES, PAGE_SIZE
from lab.workloads.attention_case import AttentionCase, Entries

EMPTY_COLUMNS = 128  # columns of -1 before the first entry of Entries.LATE: a tile of keys of most kernels


def selected_positions(case: AttentionCase, device: torch.device) -> tuple[Tensor, ...]:
    """Return for each request the positions of the keys that its rows select, int64 [q_len, top_k], -1 for none."""
    # A row at position p uses only its first min(top_k, p + 1) columns.
    selected = []
    for request, (kv_len, q_len) in enumerate(zip(case.kv_lens, case.q_lens, strict=True)):
        rng = random.Random(f"selection {case.seed} {request}")
        rows = [_row(case, rng, row, max(kv_len - q_len + row + 1, 0)) for row in range(q_len)]
        selected.append(torch.tensor(rows, dtype=torch.int64, device=device).view(q_len, case.top_k))
    return tuple(selected)


def keys_up_to_rows(case: AttentionCase) -> list[int]:
    """Return for each query row the number of keys up to and including its own position."""
    requests = zip(case.kv_lens, case.q_lens, strict=True)
    return [max(kv_len - q_len + row + 1, 0) for kv_len, q_len in requests for row in range(q_len)]


def positions_of_rank(case: AttentionCase, device: torch.device) -> tuple[Tensor, ...]:
    """Return for each request which of the rank's keys each row sees: int64 [q_len, kv_len]; column j is j if seen, else -1."""
    rank, world = case.rank or (0, 1)
    seen = []
    for end, kv_len, q_len in zip(case.all_kv_lens, case.kv_lens, case.q_lens, strict=True):
        counts = torch.tensor([len(range(rank, end - q_len + 1 + row, world)) for row in range(q_len)]).unsqueeze(1)
        keys = torch.arange(kv_len)
        seen.append(torch.where(keys < counts, keys, -1).to(device))
    return tuple(seen)


def seen_keys(case: AttentionCase, device: torch.device) -> tuple[Tensor, ...]:
    """Return for each request a mask of the keys in pages that each K/V head selects: bool [kv_len, num_kv_heads]."""
    found = []
    for request, kv_len in enumerate(case.kv_lens):
        pages = torch.zeros(-(-kv_len // case.page_size), case.num_kv_heads, dtype=torch.bool)
        for head in range(case.num_kv_heads):
            pages[case.selected_pages(request, head), head] = True
        found.append(pages.repeat_interleave(case.page_size, dim=0)[:kv_len].to(device))
    return tuple(found)


def lengths_of_heads(seen: Sequence[Tensor]) -> Tensor:
    """Return how many keys each K/V head sees, int32 [num_kv_heads, batch_size]. `seen`: masks [kv_len, num_kv_heads]."""
    return torch.stack([of_request.sum(dim=0, dtype=torch.int32) for of_request in seen], dim=1)


def draw_pages(row_lens: Sequence[int], num_kv_heads: int, generator: torch.Generator) -> Tensor:
    """Draw the pages that MiniMax-M3's indexer selects for each K/V head and row, int32 [num_kv_heads, num_rows, 16]: earlier
    pages in random order, then the row's own page, then -1. Each row sees the number of tokens in `row_lens`, at least 1.
    """
    drawn = torch.full((num_kv_heads, len(row_lens), NUM_PAGES), -1, dtype=torch.int32, device=generator.device)
    for of_head in drawn:
        for row, length in zip(of_head, row_lens, strict=True):
            own = (length - 1) // PAGE_SIZE
            pages = torch.randperm(own, generator=generator, device=drawn.device)[: NUM_PAGES - 1]
            row[: len(pages)] = pages
            row[len(pages)] = own
    return drawn


def _row(case: AttentionCase, rng: random.Random, row: int, num_keys: int) -> list[int]:
    used = min(case.top_k, num_keys)
    if used == 0 or (case.entries is Entries.NONE and (row + case.seed) % 2 == 0):
        return [-1] * case.top_k
    keys, columns = range(num_keys), range(used)
    if case.entries is Entries.ORDERED:
        chosen = sorted(rng.sample(keys, used))
    elif case.entries is Entries.SHUFFLED:
        chosen = rng.sample(keys, used)
    elif case.entries is Entries.TWICE:
        chosen = rng.sample(rng.sample(keys, (used + 1) // 2) * 2, used)
    elif case.entries is Entries.EDGES:
        starts = range(0, num_keys, case.page_size)  # of pages
        edges = sorted({num_keys - 1, *starts, *(start - 1 for start in starts if start)})
        chosen = rng.sample(edges, min(len(edges), used))
    else:
        most = 1 if case.entries is Entries.ONE else used
        if case.entries is Entries.LATE:
            columns = range(min(EMPTY_COLUMNS, used - 1), used)
            most = len(columns)
        chosen = rng.sample(keys, rng.randint(1, most))
    first_columns = range(len(chosen)) if case.top_k_lens else columns
    places = sorted(rng.sample(first_columns, len(chosen)))
    found = [-1] * case.top_k
    for column, position in zip(places, chosen, strict=True):
        found[column] = position
    return found
