"""Find suspicious inputs of a recorded call, and the inputs that caused non-finite outputs.

The arguments of a call do not show whether a page table names pages of another request. But some mistakes of an engine leave
traces in the arguments. This module returns a sentence for each trace; a trace does not change the verdict.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lab.calls import PagedAttention, Problem
from lab.calls.problem import shown_draft_tokens
from lab.references.assertion import History
from lab.references.softmax_attention import visible_keys

MOST_SHOWN = 3


@dataclass(frozen=True)
class Place:
    """The position of a K or V vector that has a non-finite element.

    Attributes:
        side: "K" or "V".
        request, token, head: index of the request, of the key within the request, and of the K/V head.
        page, slot: position in the engine's paged cache; None if K and V are not paged.
        value: the vector's first non-finite element.
    """

    side: str
    request: int
    token: int
    head: int
    page: int | None
    slot: int | None
    value: float

    def __str__(self) -> str:
        where = "" if self.page is None else f" (page {self.page}, slot {self.slot})"
        return (
            f"{self.side} of request {self.request}, key {self.token}{where}, K/V head {self.head} holds {self.value}"
        )


def suspicions(problem: Problem, histories: Sequence[History], pages: Sequence[int] | None = None) -> list[str]:
    """Return sentences about suspicious inputs: a scale of 0, rows of no request, a shared last page, non-finite K or V.

    Args:
        problem: a checked call.
        histories: its requests' K and V, from `lab.references.assertion.histories_of`.
        pages: the engine's id of each page of the problem's cache; None: the ids are the same.
    """
    found = [
        f"{name} is 0, which makes {'all weights equal' if name == 'bmm1_scale' else 'the output zero'}"
        for name, scale in (("bmm1_scale", problem.bmm1_scale), ("bmm2_scale", problem.bmm2_scale))
        if float(scale) == 0
    ]
    if problem.has_no_rows:
        return found
    end = problem.row_offsets()[-1]
    if end < problem.num_rows:
        found.append(f"rows {end} to {problem.num_rows - 1} of the query belong to no request")
    if isinstance(problem, PagedAttention):
        found += _shared_tails(problem, pages)
    for request, history in enumerate(histories):
        places = list(_non_finite(problem, request, history, pages))
        found += [f"{places[0]}, one of {len(places)} non-finite keys of the request"] if places else []
    return _shortened(found)


def _shortened(found: Sequence[str]) -> list[str]:
    left_out = len(found) - 2 * MOST_SHOWN
    return [*found[: 2 * MOST_SHOWN], *([f"and {left_out} more"] if left_out > 0 else [])]


def _engine_id(page: torch.Tensor, pages: Sequence[int] | None) -> int:
    return int(page) if pages is None else pages[int(page)]


def _shared_tails(problem: PagedAttention, pages: Sequence[int] | None) -> Iterator[str]:
    """Yield a sentence for each page that is the partly filled last page of several requests."""
    owners = defaultdict(list)
    for request, kv_len in enumerate(problem.seq_lens.tolist()):
        if kv_len % problem.page_size:
            page = _engine_id(problem.k_block_tables[request, kv_len // problem.page_size], pages)
            owners[page].append((request, kv_len))
    for page, requests in owners.items():
        if len(requests) > 1:
            several = ", ".join(str(request) for request, _ in requests)
            yield f"page {page} is the last page of requests {several}: each of them writes its next key into it"


def _non_finite(problem: Problem, request: int, history: History, pages: Sequence[int] | None) -> Iterator[Place]:
    """Yield the position of each K or V vector of a request that has a non-finite element."""
    for side, values in zip("KV", history, strict=True):
        wide = values.to(torch.float32)
        for token, head in (~wide.isfinite()).any(dim=-1).nonzero().tolist():
            vector = wide[token, head]
            where = _slot(problem, side, request, token, pages)
            yield Place(side, request, token, head, *where, float(vector[~vector.isfinite()][0]))


def _slot(
    problem: Problem, side: str, request: int, token: int, pages: Sequence[int] | None
) -> tuple[int | None, int | None]:
    if not isinstance(problem, PagedAttention):
        return None, None
    column, slot = divmod(token, problem.page_size)
    tables = problem.k_block_tables if side == "K" else problem.v_block_tables
    return _engine_id(tables[request, column], pages), slot


def origins_of_non_finite(
    problem: Problem, histories: Sequence[History], out: torch.Tensor, pages: Sequence[int] | None = None
) -> list[str]:
    """Return sentences about the inputs that made outputs non-finite, one for the first non-finite row of each request.

    Args:
        problem: the call that wrote `out`.
        histories: as in `suspicions`.
        out: [num_rows, num_qo_heads, v_head_dim].
        pages: as in `suspicions`.
    """
    bad = ~out.to(torch.float32).isfinite().all(dim=-1)
    offsets, group = problem.row_offsets(), problem.num_qo_heads // problem.num_kv_heads
    found = []
    for request, history in enumerate(histories):
        rows = bad[offsets[request] : offsets[request + 1]].nonzero().tolist()
        if not rows:
            continue
        row, head = rows[0]
        at = f"row {offsets[request] + row} (request {request}) head {head} is not finite"
        query = problem.query[offsets[request] + row, head].to(torch.float32)
        seen = visible_of_request(problem, request, offsets[request + 1] - offsets[request], len(history[0]))[row]
        places = [each for each in _non_finite(problem, request, history, pages) if each.head == head // group]
        read = [each for each in places if seen[each.token]]
        if not bool(query.isfinite().all()):
            found.append(f"{at}: so is its query")
        elif read:
            found.append(f"{at}: it sees {read[0]}")
        else:
            found.append(f"{at}: {_unseen(problem, request, len(history[0]), places, pages)}")
    return _shortened(found)


def visible_of_request(problem: Problem, request: int, q_len: int, kv_len: int) -> torch.Tensor:
    """Return bool [q_len, kv_len]: True where a row of the request sees a key."""
    first = kv_len - q_len
    mask = problem.mask if isinstance(problem, PagedAttention) else None
    visible = visible_keys(
        torch.arange(first, kv_len)[None],
        torch.arange(kv_len)[None],
        torch.tensor([kv_len]),
        causal=problem.causal and mask is None,
        window_left=problem.window_left,
    )[0]
    visible = visible.expand(q_len, kv_len).clone()
    if mask is not None:
        shown = shown_draft_tokens(mask[request : request + 1].to(torch.int32))[0]
        visible[:, max(first, 0) :] &= shown[:, max(-first, 0) :]
    return visible


def _unseen(problem: Problem, request: int, kv_len: int, hidden: Sequence[Place], pages: Sequence[int] | None) -> str:
    """Return words for non-finite K or V that a row must not read: a hidden key, or a slot after the request's last key."""
    if hidden:
        return f"it must not see {hidden[0]}"
    if isinstance(problem, PagedAttention) and kv_len % problem.page_size:
        column, first = divmod(kv_len, problem.page_size)
        for side, cache, tables in (
            ("K", problem.k_cache, problem.k_block_tables),
            ("V", problem.v_cache, problem.v_block_tables),
        ):
            page = int(tables[request, column])
            if not problem.is_nvfp4 and not bool(cache[page, :, first:].to(torch.float32).isfinite().all()):
                of_engine = _engine_id(tables[request, column], pages)
                return f"page {of_engine} holds a non-finite {side} after the request's last key, which no row sees"
    return "all that it sees is finite"
