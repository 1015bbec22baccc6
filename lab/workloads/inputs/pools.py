"""Make the pages, page tables and scale factors of a case, before its keys and values are written into them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4, NVFP4_BLOCK
from lab.workloads.attention_case import AttentionCase, TableTail


def lengths_of_heads(seen: Sequence[Tensor]) -> Tensor:
    """Return how many keys of each request a K/V head sees, int32 [num_kv_heads, batch_size], from `AttentionInputs.seen`."""
    return torch.stack([of_request.sum(dim=0, dtype=torch.int32) for of_request in seen], dim=1)


def seen_keys(case: AttentionCase, device: torch.device) -> tuple[Tensor, ...]:
    """Return the keys of each request in the pages that a K/V head selects, bool [kv_len, num_kv_heads]."""
    found = []
    for request, kv_len in enumerate(case.kv_lens):
        pages = torch.zeros(-(-kv_len // case.page_size), case.num_kv_heads, dtype=torch.bool)
        for head in range(case.num_kv_heads):
            pages[case.selected_pages(request, head), head] = True
        found.append(pages.repeat_interleave(case.page_size, dim=0)[:kv_len].to(device))
    return tuple(found)


def new_scale_factors(case: AttentionCase, pools: list[Tensor]) -> list[Tensor]:
    """Return the scale factors of K and of V for all pages of an NVFP4 cache; an empty list for other caches."""
    if case.kv_dtype != NVFP4:
        return []
    pages, *page = pools[0].shape
    page[-1] = case.head_dim // NVFP4_BLOCK
    room = 2 if case.storage.gaps_in_scale_factors else 1
    whole = torch.empty(2, pages, room, *page, dtype=E4M3, device=pools[0].device)
    return list(whole[:, :, 0].unbind(0))


def new_pools(case: AttentionCase, num_pages: int, device: torch.device) -> list[Tensor]:
    """Return uninitialised pages of K and of V; MLA has one pool for both."""
    new: dict[str, Any] = {"dtype": case.kv_dtype, "device": device}
    if case.is_mla:
        return [torch.empty(num_pages, case.page_size, case.head_dim, **new)]
    width = case.head_dim // 2 if case.kv_dtype == NVFP4 else case.head_dim
    page: tuple[int, ...] = (case.num_kv_heads, case.page_size, width)
    if case.storage.kv_layout == "NHD":
        page = (case.page_size, case.num_kv_heads, width)
    if case.storage.stacked:
        return list(torch.empty(num_pages, 2, *page, **new).unbind(1))
    return list(torch.empty(2, num_pages, *page, **new).unbind(0))


def block_tables(
    case: AttentionCase, tables: Sequence[Tensor], most_pages: int, live: list[int], device: torch.device
) -> Tensor:
    """Return page tables, int32 [len(tables), columns], whose columns after the pages in `tables` hold what the case says.

    Args:
        case: says how many columns follow `most_pages`, and what they hold.
        tables: the page ids of each row.
        most_pages: number of pages of the longest request.
        live: ids of pages that some row lists.
        device: where the tables are.
    """
    width = most_pages + case.storage.spare_columns
    if case.storage.table_tail is TableTail.FOREIGN:
        cells = torch.tensor(live, dtype=torch.int32).repeat(-(-len(tables) * width // len(live)))
        filled = cells[: len(tables) * width].view(len(tables), width).flip(0)
    else:
        value = -1 if case.storage.table_tail is TableTail.NEGATIVE else 2**30
        filled = torch.full((len(tables), width), value, dtype=torch.int32)
    for row, table in enumerate(tables):
        filled[row, : len(table)] = table
    return filled.to(device)
