"""The K/V slots (indices of tokens in the K/V pool) that each step of a multi-step draft reads, computed in plain loops."""

import torch
from torch import Tensor

from lab.calls.entry import with_own_settings


@with_own_settings
def generate_draft_decode_kv_indices(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    paged_kernel_lens: Tensor,
    positions: Tensor,
    *,
    num_steps: int,
    topk: int,
    page_size: int,
    window_size: int = 0,
    sink_size: int = 0,
    entry_page_size: int = 1,
    v2p: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the ragged K/V lists that SGLang's multi-step draft backends pass to their attention (0.5.11 to 0.5.23).

    Step ``s`` of a draft reads, for each branch of each request, the request's prefix and the ``s + 1`` tokens that the
    branch has drafted, including the step's own. A branch's draft slots follow the prefix in the request's row of
    ``req_to_token``. If pages have several tokens and requests several branches, each branch has its own pages. Its
    first page repeats the prefix's last page if that is partly filled.

    The arguments from ``window_size`` on are from ``sglang/kernels/ops/speculative/cache_locs.py`` in 0.5.23.

    Args:
        req_pool_indices: ``[num_requests]`` int, each request's row of ``req_to_token``.
        req_to_token: ``[num_rows, row_width]`` int, slots by position, or pages by ``position // entry_page_size``.
        paged_kernel_lens: ``[num_requests]`` int, tokens of each prefix.
        positions: ``[num_requests * topk]`` int, each prefix length ``topk`` times. ``kv_indptr`` is summed from them;
            ``kv_indices`` depends only on ``paged_kernel_lens``. If they are not the prefix lengths, ``kv_indptr`` does
            not say where the lists begin.
        num_steps: ``speculative_num_steps``, the number of lists that are made. An engine reads only ``num_steps - 1`` of them.
        topk: branches per request.
        page_size: tokens per page.
        window_size: tokens at a prefix's end that a list keeps; 0 keeps the whole prefix. Drafted tokens are always kept.
        sink_size: tokens at a prefix's start that a list with a window keeps too; 0 without a window. ``kv_indptr`` counts at
            most ``window_size + sink_size`` tokens of each of ``positions``.
        entry_page_size: tokens that an entry of ``req_to_token`` covers: 1, or ``page_size`` if entries are pages.
        v2p: ``[num_virtual_pages]`` int, the physical page of each virtual page, if ``req_to_token`` has virtual slots or
            pages. A virtual slot becomes slot 0 if it is below 0 or its page is below 0.

    Returns:
        (kv_indices, kv_indptr), each a list with one int64 tensor per step: the slots of all branches of all requests without
        gaps, and ``[num_requests * topk + 1]`` boundaries that start with 0.

    Raises:
        ValueError: a length is negative, a branch's draft slots lie beyond the end of its row, a virtual page lies beyond the
            end of ``v2p``, ``sink_size`` is given without a window, or ``entry_page_size`` is neither 1 nor ``page_size``.
    """
    lens, rows = paged_kernel_lens.tolist(), req_pool_indices.tolist()
    _check(lens, page_size, window_size, sink_size, entry_page_size)
    entries = {row: req_to_token[row].tolist() for row in set(rows)}
    pages = None if v2p is None else v2p.tolist()
    row_width = req_to_token.shape[1] * entry_page_size

    def slot_at(row: int, position: int) -> int:
        slot = entries[row][position // entry_page_size] * entry_page_size + position % entry_page_size
        return slot if pages is None else _physical_slot(slot, pages, page_size)

    kv_indices, kv_indptr = [], []
    for step in range(num_steps):
        slots, boundaries = [], [0]
        for row, length in zip(rows, lens, strict=True):
            for branch in range(topk):
                start = draft_start(length, branch, num_steps=num_steps, topk=topk, page_size=page_size)
                if start + step + 1 > row_width:
                    raise ValueError(
                        f"row {row}: step {step} of branch {branch} reads position {start + step}, but req_to_token has "
                        f"{req_to_token.shape[1]} columns of {entry_page_size} tokens"
                    )
                slots += [slot_at(row, position) for position in kept_positions(length, window_size, sink_size)]
                slots += [slot_at(row, start + drafted) for drafted in range(step + 1)]
        for position in positions.tolist():
            kept = min(position, window_size + sink_size) if window_size else position
            boundaries.append(boundaries[-1] + kept + step + 1)
        kv_indices.append(torch.tensor(slots, dtype=torch.int64))
        kv_indptr.append(torch.tensor(boundaries, dtype=torch.int64))
    return kv_indices, kv_indptr


def draft_start(length: int, branch: int, *, num_steps: int, topk: int, page_size: int) -> int:
    """Return the position in a request's row of ``req_to_token`` at which the slots of a branch's drafted tokens begin."""
    if page_size == 1 or topk == 1:
        return length + branch * num_steps
    in_last_page = length % page_size
    pages_per_branch = -(-(in_last_page + num_steps) // page_size)
    return (length - in_last_page) + branch * pages_per_branch * page_size + in_last_page


def kept_positions(length: int, window_size: int, sink_size: int) -> list[int]:
    """Return the prefix positions in a K/V list: all, or with a window the first `sink_size` and the last `window_size`."""
    return [at for at in range(length) if not window_size or at < sink_size or at >= length - window_size]


def _physical_slot(slot: int, pages: list[int], page_size: int) -> int:
    page, token = divmod(slot, page_size)
    if page >= len(pages):
        raise ValueError(f"slot {slot} is in virtual page {page}, but v2p has {len(pages)} pages")
    return pages[page] * page_size + token if slot >= 0 and pages[page] >= 0 else 0


def _check(lens: list[int], page_size: int, window_size: int, sink_size: int, entry_page_size: int) -> None:
    if any(length < 0 for length in lens):
        raise ValueError(f"paged_kernel_lens={lens} must not be negative")
    if min(window_size, sink_size) < 0 or (sink_size and not window_size):
        raise ValueError(
            f"window_size={window_size} and sink_size={sink_size} must not be negative, and a sink needs a window"
        )
    if entry_page_size not in (1, page_size):
        raise ValueError(f"entry_page_size={entry_page_size} must be 1 or page_size={page_size}")
