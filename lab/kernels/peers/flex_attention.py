"""torch's `flex_attention` over a paged cache, under the names of FlashInfer's decode and context calls.

The whole pool is one sequence of tokens, and one page is one block of keys. The mask function looks up a token's position in
its request in a table, as torch's own `PagedAttention` does (`torch/nn/attention/experimental/_paged_attention.py`). If all
requests have the same number of rows, each request is a batch entry. Otherwise all rows are one sequence, and a block of rows
reads the pages of each request that has rows in it.

On a GPU `plan_<name>` compiles, which takes torch some ten seconds for a new shape. `flex_attention` has no `out`: the results
are copied. On a CPU nothing is compiled, and torch computes the scores of all keys of the pool. The weight of a hidden key is
0, so that NaN in its value reaches the output: the judge's check K4 (poison) reports it.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from lab.calls import ContextCall, DecodeCall
from lab.calls.problem import PagedAttention, shown_draft_tokens
from lab.kernels.flashinfer_call import PreparedCall, entries
from lab.kernels.support.peers import FLEX_ATTENTION
from lab.kernels.support.stored_cache import token_list

LOG2_E = math.log2(math.e)
Q_BLOCK = 128  # rows of a block, torch's default
MOST_KEYS = 64  # of a tile: torch's default on SM90 does not divide a page of 64
MOST_ELEMENTS = 32 * 256  # of K in a tile: torch's default on SM90 for heads of 256, which fits in shared memory


def _plan(call: DecodeCall | ContextCall, problem: PagedAttention) -> PreparedCall:
    """Make the block lists of a decode or context call, compile `flex_attention`, and return a function that runs the call.
    `lab.calls.DecodeCall` and `ContextCall` document shapes, dtypes and errors. Raises NotImplementedError with the reason if
    the kernel does not support the call, a CUDA graph is being captured, or a request has a page twice. `workspace_buffer` is
    not used.
    """
    out, lse = problem.results()
    rows = _rows_of(problem)
    keys, values = token_list(problem.k_cache), token_list(problem.v_cache)
    assert keys is not None
    assert values is not None
    arguments = {
        "query": rows.unflattened(problem.query).transpose(1, 2),
        "key": keys.transpose(0, 1).unsqueeze(0),
        "value": values.transpose(0, 1).unsqueeze(0),
        "out": rows.unflattened(out),
        "lse": None if lse is None else rows.unflattened(lse),
        "block_mask": _block_mask(problem, rows, len(keys)),
        "scale": float(problem.bmm1_scale),
        "options": {
            "BLOCK_N": min(problem.page_size, MOST_KEYS, MOST_ELEMENTS // problem.head_dim),
            # For fewer than 128 rows torch splits the keys, by a kernel that supports at most 128 rows times heads of a group.
            "FORCE_USE_FLEX_ATTENTION": rows.request.shape[1] * problem.group > Q_BLOCK,
        },
    }
    attend = _attend
    if problem.query.device.type == "cuda":
        attend = _compiled()
        # Beyond a number of shapes torch would silently stop compiling, and compute the whole matrix of scores.
        with torch._dynamo.config.patch(recompile_limit=2**20, accumulated_recompile_limit=2**20):
            attend(**arguments)
    return PreparedCall(attend, arguments, returned=problem.returned(out, lse))


@functools.cache
def _compiled() -> Callable[..., None]:
    return torch.compile(_attend, dynamic=False, fullgraph=True)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    block_mask: Any,
    scale: float,
    options: Any,
) -> None:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    found, aux = flex_attention(
        query,
        key,
        value,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=options,
        return_aux=AuxRequest(lse=lse is not None),
    )
    out.copy_(found.transpose(1, 2))
    if lse is not None and aux.lse is not None:
        lse.copy_(aux.lse.transpose(1, 2) * LOG2_E)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Each query row's request and visible key positions, in tensors int32 [batch_size, q_len], or [1, num_rows] if ragged."""

    request: torch.Tensor
    first: torch.Tensor  # position of the first key that a row may see; 0 for padding rows
    last: torch.Tensor  # position of the last key that a row may see; -1 for padding rows
    whole_to: torch.Tensor  # position of the last key that no draft mask hides; `last` without a mask

    def unflattened(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, self.request.shape)


def _rows_of(problem: PagedAttention) -> _Rows:
    offsets = torch.tensor(problem.row_offsets(), device=problem.query.device)
    q_lens, kv_lens = offsets.diff(), offsets.new_tensor(problem.seq_lens.tolist())
    request = torch.arange(problem.batch_size, device=offsets.device).repeat_interleave(q_lens)
    end = kv_lens[request]
    position = end - offsets[request + 1] + torch.arange(len(request), device=offsets.device)
    first = (position - problem.window_left).clamp(min=0) if problem.window_left >= 0 else torch.zeros_like(position)
    last = position if problem.causal and problem.mask is None else end - 1
    whole_to = last if problem.mask is None else end - q_lens[request] - 1
    width = problem.max_q_len if problem.cu_seqlens_q is None else problem.num_rows
    padding = (0, problem.num_rows - len(request))
    columns = ((request, 0), (first, 0), (last, -1), (whole_to, -1))
    return _Rows(*(pad(column.to(torch.int32), padding, value=value).view(-1, width) for column, value in columns))


def _block_mask(problem: PagedAttention, rows: _Rows, num_tokens: int) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    num_entries, num_rows = rows.request.shape
    num_blocks, page_size = -(-num_rows // Q_BLOCK), problem.page_size
    pages = _page_in_request(problem, num_tokens // page_size)
    partial, full = pages.new_zeros((2, num_entries, 1, num_blocks, pages.shape[1]), dtype=torch.bool)
    for entry, block in itertools.product(range(num_entries), range(num_blocks)):
        of_rows = entry, slice(block * Q_BLOCK, (block + 1) * Q_BLOCK)
        page = pages[rows.request[of_rows]]
        begin, end = page * page_size, (page + 1) * page_size - 1
        first, last, whole_to = (each[of_rows].unsqueeze(1) for each in (rows.first, rows.last, rows.whole_to))
        full[entry, 0, block] = ((page >= 0) & (begin >= first) & (end <= whole_to)).all(0)
        partial[entry, 0, block] = ((page >= 0) & (begin <= last) & (end >= first)).any(0)
    return BlockMask.from_kv_blocks(
        *_lists(partial & ~full),
        *_lists(full),
        BLOCK_SIZE=(Q_BLOCK, page_size),
        mask_mod=_mask(problem, rows, pages),
        seq_lengths=(num_rows, num_tokens),
        compute_q_blocks=False,  # only a backward pass reads them
    )


def _page_in_request(problem: PagedAttention, num_pages: int) -> torch.Tensor:
    """Return each page's column in each request's page table, int32 [batch_size, num_pages]; -1 if the table lacks the page."""
    found = torch.full((problem.batch_size, num_pages), -1, dtype=torch.int32, device=problem.query.device)
    for request, kv_len in enumerate(problem.seq_lens.tolist()):
        live = problem.k_block_tables[request, : -(-kv_len // problem.page_size)].to(torch.int64)
        twice = (live.bincount() > 1).nonzero()
        if len(twice):
            raise NotImplementedError(
                f"torch's flex_attention finds a page's place in its request by the page's id: request {request} must not "
                f"have page {int(twice[0])} twice"
            )
        found[request, live] = torch.arange(len(live), dtype=torch.int32, device=found.device)
    return found


def _lists(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each row of `seen`, the number of True items, and the indices of all items, those of True items first."""
    ids = seen.to(torch.int8).argsort(stable=True, dim=-1, descending=True)
    return seen.sum(-1, dtype=torch.int32), ids.to(torch.int32)


def _mask(problem: PagedAttention, rows: _Rows, pages: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return `BlockMask`'s mask function: True if row `row` of batch entry `entry` sees token `token` of the pool."""
    page_size = problem.page_size

    def sees(entry: torch.Tensor, head: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        page = pages[rows.request[entry, row], token // page_size]
        position = page * page_size + token % page_size
        return (page >= 0) & (position >= rows.first[entry, row]) & (position <= rows.last[entry, row])

    if problem.mask is None:
        return sees
    shown = shown_draft_tokens(problem.mask.to(torch.int32))

    def sees_draft(entry: torch.Tensor, head: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        page = pages[entry, token // page_size]
        draft = page * page_size + token % page_size - rows.whole_to[entry, row] - 1
        in_draft = shown[entry, row, draft.clamp(0, shown.shape[2] - 1)]
        return sees(entry, head, row, token) & ((draft < 0) | in_draft)

    return sees_draft


plan_trtllm_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache = entries(
    "plan", DecodeCall, _plan, FLEX_ATTENTION
)
plan_trtllm_batch_context_with_kv_cache, trtllm_batch_context_with_kv_cache = entries(
    "plan", ContextCall, _plan, FLEX_ATTENTION
)
