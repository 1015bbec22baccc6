"""torch's `flex_attention` over a paged cache, under the names of the decode and the context call.

The whole pool is one sequence of tokens, and one page is one block of keys. The mask function looks a token's position in its
request up in a table, as torch's own `PagedAttention` does (`torch/nn/attention/experimental/_paged_attention.py`). Pages that
every row of a block of rows sees are listed as full blocks, for which the mask function is not called. If all requests have the
same number of rows, each request is a batch entry. Otherwise all rows are one sequence, and a block of rows reads the pages of
each request that has rows in it.

Block lists and tables are made on the host from the lengths. `plan_<name>` makes them once (`lab.kernels.PlannedOnce`). On a
GPU it also compiles, which takes torch some ten seconds for a new shape. `flex_attention` has no `out`: the results are copied
into it. On a CPU nothing is compiled, and the whole matrix of scores is made. The value of a hidden key is multiplied by 0, so
that NaN in a page's unused cells reaches the output: the judge's check K4 (poison) reports it.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lab.calls import ContextCall, DecodeCall
from lab.calls.problem import AttentionCall, PagedAttention, shown_draft_tokens
from lab.gpus import Capability
from lab.kernels.flashinfer_call import PreparedCall
from lab.kernels.peers.entries import Ready, entries
from lab.kernels.peers.planned import refuse_planning_in_capture
from lab.kernels.support import Kernel, refuse_unsupported
from lab.kernels.support.packages import FLEX_ATTENTION
from lab.kernels.support.stored_cache import token_list

LOG2_E = math.log2(math.e)
Q_BLOCK = 128  # rows of a block, torch's default
MOST_KEYS = 64  # of a tile: torch's default on SM90 does not divide a page of 64
MOST_ELEMENTS = 32 * 256  # of a tile: torch's default on SM90 for heads of 256; 64 keys of them need more shared memory


def kernel_for(call: AttentionCall, capability: Capability) -> Kernel:
    return FLEX_ATTENTION


def _plan(call: DecodeCall | ContextCall, problem: PagedAttention) -> Ready:
    """Plan a decode or context call: make its block lists and compile. Return it as a ready call.

    `lab.calls.DecodeCall` and `ContextCall` document parameters, shapes, dtypes and errors. `workspace_buffer` is not used.

    Raises:
        NotImplementedError: the kernel does not support the call (`lab.kernels.support.why_not` gives the reason), a CUDA graph
            is being captured, or a request has a page twice.
    """
    out, lse = problem.results()
    refuse_unsupported(FLEX_ATTENTION, problem)
    refuse_planning_in_capture("torch's flex_attention", problem.query.device)
    rows = _rows_of(problem)
    keys, values = (_by_heads(pool) for pool in (problem.k_cache, problem.v_cache))
    arguments = {
        "query": rows.unflattened(problem.query).transpose(1, 2),
        "key": keys,
        "value": values,
        "out": rows.unflattened(out),
        "lse": None if lse is None else rows.unflattened(lse),
        "block_mask": _block_mask(problem, rows, keys.shape[2]),
        "scale": float(problem.bmm1_scale),
        "options": {
            "BLOCK_N": min(problem.page_size, MOST_KEYS, MOST_ELEMENTS // problem.head_dim),
            # torch splits keys for fewer rows than 128, and has no such kernel if they, times the heads of a group, are more.
            "FORCE_USE_FLEX_ATTENTION": len(rows.grid[0]) * problem.group > Q_BLOCK,
        },
    }
    attend = _attend
    if problem.query.device.type == "cuda":
        attend = _compiled()
        # Beyond a limit of shapes torch would stop to compile without a word, and make the whole matrix of scores.
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
    """Run `flex_attention`, and write its output to `out` and its LSE in base 2 to `lse` unless that is None.

    In both tensors rows come before heads.
    """
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


def _by_heads(pool: torch.Tensor) -> torch.Tensor:
    """Return a pool of K or V as a view [1, heads, tokens, head_dim], as `flex_attention` takes it."""
    tokens = token_list(pool)
    assert tokens is not None
    return tokens.transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True)
class _Row:
    """One query row: its request, and the first and last position that it may see.

    Padding has positions 0 and -1, so that it sees none.
    """

    request: int = 0
    first: int = 0
    last: int = -1


@dataclass(frozen=True)
class _Rows:
    """All query rows, as a grid [entries, rows of an entry] for `flex_attention`. An entry is an index of its batch axis.

    There is one entry per request if all requests have equally many rows, otherwise a single entry.

    Attributes:
        grid: the rows of each entry.
        kv_lens, q_lens: the numbers of keys and query rows of each request.
    """

    grid: list[list[_Row]]
    kv_lens: list[int]
    q_lens: list[int]

    def unflattened(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a tensor [num_rows, ...] as a view [entries, rows of an entry, ...]."""
        return rows.unflatten(0, (len(self.grid), len(self.grid[0])))

    def column(self, name: str, device: torch.device) -> torch.Tensor:
        """Return one attribute of every `_Row`, such as "first", as int32 [entries, rows of an entry]."""
        listed = [[getattr(row, name) for row in entry] for entry in self.grid]
        return torch.tensor(listed, dtype=torch.int32, device=device)


def _rows_of(problem: PagedAttention) -> _Rows:
    offsets, kv_lens = problem.row_offsets(), problem.seq_lens.tolist()
    q_lens = [end - start for start, end in itertools.pairwise(offsets)]
    sees_ahead = not problem.causal or problem.mask is not None
    rows = [_Row()] * problem.num_rows
    for request, (start, q_len, kv_len) in enumerate(zip(offsets, q_lens, kv_lens, strict=False)):
        for place in range(q_len):
            position = kv_len - q_len + place
            first = max(0, position - problem.window_left) if problem.window_left >= 0 else 0
            rows[start + place] = _Row(request, first, kv_len - 1 if sees_ahead else position)
    width = problem.max_q_len if problem.cu_seqlens_q is None else problem.num_rows
    grid = [rows[start : start + width] for start in range(0, len(rows), width)]
    return _Rows(grid, kv_lens, q_lens)


def _block_mask(problem: PagedAttention, rows: _Rows, num_tokens: int) -> Any:
    """Return torch's `BlockMask`: the mask function, and which pages each block of query rows sees in part or in whole."""
    from torch.nn.attention.flex_attention import BlockMask

    device, page_size = problem.query.device, problem.page_size
    most = max(-(-kv_len // page_size) for kv_len in rows.kv_lens)
    table = problem.k_block_tables[:, :most].tolist()
    _check_pages_are_once(table, rows.kv_lens, page_size)
    num_blocks = -(-len(rows.grid[0]) // Q_BLOCK)
    partial: list[list[int]] = []
    full: list[list[int]] = []
    for entry, block in itertools.product(rows.grid, range(num_blocks)):
        for kind, pages in zip(
            (partial, full), _pages_of(problem, rows, entry[block * Q_BLOCK :][:Q_BLOCK]), strict=True
        ):
            kind.append([table[request][page] for request, page in pages])
    shape = (len(rows.grid), 1, num_blocks, num_tokens // page_size)
    # Requests may share
    num_partial, partial_ids = _lists([list(dict.fromkeys(pages)) for pages in partial], shape, device)
    num_full, full_ids = _lists(full, shape, device)
    return BlockMask(
        seq_lengths=(len(rows.grid[0]), num_tokens),
        kv_num_blocks=num_partial,
        kv_indices=partial_ids,
        full_kv_num_blocks=num_full,
        full_kv_indices=full_ids,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(Q_BLOCK, page_size),
        mask_mod=_mask(problem, rows, num_tokens // page_size),
    )


def _check_pages_are_once(table: list[list[int]], kv_lens: list[int], page_size: int) -> None:
    """Raise NotImplementedError if a request has a page twice: the mask function finds only one position of a page."""
    for request, (pages, kv_len) in enumerate(zip(table, kv_lens, strict=True)):
        twice = [page for page, times in Counter(pages[: -(-kv_len // page_size)]).items() if times > 1]
        if twice:
            raise NotImplementedError(
                f"torch's flex_attention finds a page's place in its request by the page's id: request {request} must not "
                f"have page {twice[0]} twice"
            )


def _pages_of(
    problem: PagedAttention, rows: _Rows, block: list[_Row]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the (request, page) pairs that a block of query rows reads, as two lists.

    Pages of the first list need the mask function, because not every row of the block sees all their tokens. Every row sees all
    tokens of the pages of the second list.
    """
    partial: list[tuple[int, int]] = []
    full: list[tuple[int, int]] = []
    groups = [list(group) for _, group in itertools.groupby(block, key=lambda row: row.request)]
    seeing = [group for group in ([row for row in group if row.last >= row.first] for group in groups) if group]
    for group in seeing:
        request, page_size = group[0].request, problem.page_size
        all_see_from, all_see_to = max(row.first for row in group), min(row.last for row in group)
        if problem.mask is not None:
            all_see_to = rows.kv_lens[request] - rows.q_lens[request] - 1
        first, last = min(row.first for row in group), max(row.last for row in group)
        for page in range(first // page_size, last // page_size + 1):
            whole = all_see_from <= page * page_size and (page + 1) * page_size - 1 <= all_see_to
            is_full = whole and len(seeing) == 1 and len(group) == len(block)
            (full if is_full else partial).append((request, page))
    return partial, full


def _lists(pages: list[list[int]], shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (number of pages, page ids) of each block of query rows, int32, in the form of torch's `BlockMask`.

    Lists are padded with 0 to the number of all pages, with which `shape` ends.
    """
    padded = [each + [0] * (shape[-1] - len(each)) for each in pages]
    counts = torch.tensor([len(each) for each in pages], dtype=torch.int32, device=device)
    return counts.view(shape[:-1]), torch.tensor(padded, dtype=torch.int32, device=device).view(shape)


def _mask(problem: PagedAttention, rows: _Rows, num_pages: int) -> Callable[..., torch.Tensor]:
    """Return the mask function of `flex_attention`: True where a query row sees a token.

    It takes (batch entry, head, row of the entry, token), the token as an index into the pool.
    """
    device, page_size = problem.query.device, problem.page_size
    request_of, first, last = (rows.column(name, device) for name in ("request", "first", "last"))
    page_in_request = torch.full((problem.batch_size, num_pages), -1, dtype=torch.int32, device=device)
    for request, kv_len in enumerate(rows.kv_lens):
        live = problem.k_block_tables[request, : -(-kv_len // page_size)].to(torch.int64)
        page_in_request[request, live] = torch.arange(len(live), dtype=torch.int32, device=device)

    def sees(entry: torch.Tensor, head: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        page = page_in_request[request_of[entry, row], token // page_size]
        position = page * page_size + token % page_size
        return (page >= 0) & (position >= first[entry, row]) & (position <= last[entry, row])

    if problem.mask is None:
        return sees
    prefix = torch.tensor(
        [k - q for k, q in zip(rows.kv_lens, rows.q_lens, strict=True)], dtype=torch.int32, device=device
    )
    shown = shown_draft_tokens(problem.mask.to(torch.int32))

    def sees_draft(entry: torch.Tensor, head: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        page = page_in_request[entry, token // page_size]
        draft = page * page_size + token % page_size - prefix[entry]
        in_draft = shown[entry, row, draft.clamp(0, shown.shape[2] - 1)]
        return sees(entry, head, row, token) & ((draft < 0) | in_draft)

    return sees_draft


plan_trtllm_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache = entries("plan", DecodeCall, _plan)
plan_trtllm_batch_context_with_kv_cache, trtllm_batch_context_with_kv_cache = entries("plan", ContextCall, _plan)
