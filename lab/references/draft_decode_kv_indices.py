"""The K/V slots that each step of a multi-step draft reads, written one step, request, branch and token at a time."""

import torch
from torch import Tensor


def generate_draft_decode_kv_indices(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    paged_kernel_lens: Tensor,
    positions: Tensor,
    *,
    num_steps: int,
    topk: int,
    page_size: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the ragged K/V lists that SGLang's multi-step draft backends hand their attention (0.5.11 to 0.5.23).

    Step ``s`` of a draft reads, for each branch of each request, the request's prefix and the ``s + 1`` tokens that the
    branch has drafted, the step's own included. A branch's draft slots follow the prefix in the request's row; with pages
    and several branches, each branch has its own pages, of which the first repeats the prefix's last, partly filled one.

    Args:
        req_pool_indices: ``[num_requests]`` int, each request's row of ``req_to_token``.
        req_to_token: ``[num_rows, row_width]`` int, slots by position.
        paged_kernel_lens: ``[num_requests]`` int, tokens of each prefix.
        positions: ``[num_requests * topk]`` int, what ``kv_indptr`` is summed from: each prefix length, ``topk`` times.
            ``kv_indices`` follows ``paged_kernel_lens`` alone.
        num_steps: ``speculative_num_steps``; that many lists are made although one fewer are read.
        topk: branches per request.
        page_size: tokens per page.

    Returns:
        (kv_indices, kv_indptr), each a list with one int64 tensor per step: the slots of all requests' branches end to
        end, and ``[num_requests * topk + 1]`` boundaries that start with 0.

    Raises:
        ValueError: a length is negative, or a branch's draft slots lie beyond the end of its row.
    """
    lens, rows = paged_kernel_lens.tolist(), req_pool_indices.tolist()
    row_slots = {row: req_to_token[row].tolist() for row in set(rows)}
    if any(length < 0 for length in lens):
        raise ValueError(f"paged_kernel_lens={lens} must not be negative")
    kv_indices, kv_indptr = [], []
    for step in range(num_steps):
        slots, boundaries = [], [0]
        for row, length in zip(rows, lens, strict=True):
            for branch in range(topk):
                start = draft_start(length, branch, num_steps=num_steps, topk=topk, page_size=page_size)
                if start + step + 1 > req_to_token.shape[1]:
                    raise ValueError(
                        f"row {row}: step {step} of branch {branch} reads position {start + step}, but req_to_token has "
                        f"{req_to_token.shape[1]} columns"
                    )
                slots += [row_slots[row][position] for position in range(length)]
                slots += [row_slots[row][start + drafted] for drafted in range(step + 1)]
        for position in positions.tolist():
            boundaries.append(boundaries[-1] + position + step + 1)
        kv_indices.append(torch.tensor(slots, dtype=torch.int64))
        kv_indptr.append(torch.tensor(boundaries, dtype=torch.int64))
    return kv_indices, kv_indptr


def draft_start(length: int, branch: int, *, num_steps: int, topk: int, page_size: int) -> int:
    """Return the position in a request's row where a branch's draft slots begin.

    With pages and several branches, each branch continues in a copy of the prefix's last, partly filled page.
    """
    if page_size == 1 or topk == 1:
        return length + branch * num_steps
    in_last_page = length % page_size
    pages_per_branch = -(-(in_last_page + num_steps) // page_size)
    return (length - in_last_page) + branch * pages_per_branch * page_size + in_last_page
