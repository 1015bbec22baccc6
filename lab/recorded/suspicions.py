"""Find suspicious inputs of a recorded call, and the inputs that caused non-finite outputs.

The arguments of a call do not show whether a page table names pages of another request. But some mistakes of an engine leave
traces in the arguments. This module returns a sentence for each trace; a trace does not change the verdict.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lab.calls import PagedAttention, Problem
from lab.calls.entries import places_of, selections_of
from lab.calls.problem import shown_draft_tokens
from lab.references.assertion import History
from lab.references.softmax_attention import visible_to

MOST_SHOWN = 6


class Place(NamedTuple):
    """The position of a vector in the histories: side 0 for K and 1 for V, request, key within the request, K/V head."""

    side: int
    request: int
    token: int
    head: int


@dataclass(frozen=True, eq=False)
class RecordedInputs:
    """The inputs of a recorded call, in which traces are searched.

    Attributes:
        problem: a checked call.
        histories: its requests' K and V, from `lab.references.assertion.histories_of`.
        pages: the engine's id of each page of the problem's cache; None: the ids are the same.
        first_kv_head: the number of the problem's first K/V head in the call; not 0 for a part of a block-sparse call.
    """

    problem: Problem
    histories: Sequence[History]
    pages: Sequence[int] | None = None
    first_kv_head: int = 0

    def suspicions(self) -> list[str]:
        """Return sentences about suspicious inputs: a scale of 0, rows of no request, a shared last page, non-finite K or V."""
        problem, end = self.problem, self.problem.row_offsets()[-1]
        found = [
            f"{name} is 0, which makes {'all weights equal' if name == 'bmm1_scale' else 'the output zero'}"
            for name, scale in (("bmm1_scale", problem.bmm1_scale), ("bmm2_scale", problem.bmm2_scale))
            if float(scale) == 0
        ]
        if end < problem.num_rows:
            found.append(f"rows {end} to {problem.num_rows - 1} of the query belong to no request")
        if isinstance(problem, PagedAttention) and problem.selected is None:
            found += self._shared_tails(problem)
        for request in range(problem.batch_size):
            if places := self._non_finite(request):
                found.append(f"{self._words(places[0])}, one of {len(places)} non-finite keys of the request")
        return _shortened(found)

    def origins_of_non_finite(self, out: torch.Tensor) -> list[str]:
        """Return sentences about the inputs that made outputs non-finite, one for the first non-finite row of each request.

        Args:
            out: the output of the call, [num_rows, num_qo_heads, v_head_dim].
        """
        problem, offsets, found = self.problem, self.problem.row_offsets(), []
        bad = ~out.to(torch.float32).isfinite().all(dim=-1)
        for request, (keys, _) in enumerate(self.histories):
            rows = bad[offsets[request] : offsets[request + 1]].nonzero().tolist()
            if not rows:
                continue
            row, head = rows[0]
            seen = visible_of_request(problem, request, offsets[request + 1] - offsets[request], len(keys))[row]
            kv_head = head // (problem.group)
            places = [each for each in self._non_finite(request) if each.head == kv_head]
            read = [each for each in places if seen[each.token]]
            if not bool(problem.query[offsets[request] + row, head].to(torch.float32).isfinite().all()):
                why = "so is its query"
            else:
                why = f"it sees {self._words(read[0])}" if read else self._unseen(request, len(keys), places)
            head += self.first_kv_head * problem.group
            found.append(f"row {offsets[request] + row} (request {request}) head {head} is not finite: {why}")
        return _shortened(found)

    def _shared_tails(self, problem: PagedAttention) -> Iterator[str]:
        """Yield a sentence for each page that is the partly filled last page of several requests."""
        owners = defaultdict(list)
        for request, kv_len in enumerate(problem.seq_lens.tolist()):
            if kv_len % problem.page_size:
                owners[self._page(0, request, kv_len - 1)].append(str(request))
        for page, requests in owners.items():
            if len(requests) > 1:
                several = ", ".join(requests)
                yield f"page {page} is the last page of requests {several}: each of them writes its next key into it"

    def _non_finite(self, request: int) -> list[Place]:
        """Return the K and V vectors of a request that have a non-finite element."""
        return [
            Place(side, request, token, head)
            for side, values in enumerate(self.histories[request])
            for token, head in (~values.to(torch.float32).isfinite()).any(dim=-1).nonzero().tolist()
        ]

    def _unseen(self, request: int, kv_len: int, hidden: Sequence[Place]) -> str:
        """Return words for non-finite K or V that a row must not read: a hidden key, or a slot after the request's last key."""
        problem = self.problem
        if hidden:
            return f"it must not see {self._words(hidden[0])}"
        if not isinstance(problem, PagedAttention) or problem.selected is not None:
            return "all that it sees is finite"
        if kv_len % problem.page_size and not problem.is_nvfp4:
            for side, cache in enumerate((problem.k_cache, problem.v_cache)):
                last, slot = self._place(side, request, kv_len - 1)
                if not bool(cache[last, :, slot + 1 :].to(torch.float32).isfinite().all()):
                    page = self._page(side, request, kv_len - 1)
                    return (
                        f"page {page} holds a non-finite {'KV'[side]} after the request's last key, which no row sees"
                    )
        return "all that it sees is finite"

    def _words(self, place: Place) -> str:
        """Name a vector by its position in the request and in the engine's cache, with its first non-finite element."""
        side, request, token, head = place
        vector, where = self.histories[request][side][token, head].to(torch.float32), ""
        if isinstance(self.problem, PagedAttention):
            where = f" (page {self._page(side, request, token)}, slot {self._place(side, request, token)[1]})"
        value = float(vector[~vector.isfinite()][0])
        return (
            f"{'KV'[side]} of request {request}, key {token}{where}, K/V head {self.first_kv_head + head} holds {value}"
        )

    def _place(self, side: int, request: int, token: int) -> tuple[int, int]:
        """Return the page of a key in the problem's cache, and the key's slot in the page."""
        assert isinstance(self.problem, PagedAttention)
        at = torch.tensor([[request], [token]], device=self.problem.query.device)
        return divmod(int(places_of(self.problem, *at)[side]), self.problem.page_size)

    def _page(self, side: int, request: int, token: int) -> int:
        """Return the engine's id of the page of a key."""
        page, _ = self._place(side, request, token)
        return page if self.pages is None else self.pages[page]


def visible_of_request(problem: Problem, request: int, q_len: int, kv_len: int) -> torch.Tensor:
    """Return bool [q_len, kv_len]: True where a row of the request sees a key. If rows select entries, the request's keys are
    the entries that `selections_of` returns.
    """
    if isinstance(problem, PagedAttention) and problem.selected is not None:
        ((places, indices),) = selections_of(problem, [request])
        return (indices.unsqueeze(2) == torch.arange(len(places), device=indices.device)).any(dim=1)
    if isinstance(problem, PagedAttention) and problem.num_visible is not None:
        start = problem.row_offsets()[request]
        counts = problem.num_visible[start : start + q_len]
        return torch.arange(kv_len, device=counts.device) < counts[:, None]
    mask = problem.mask if isinstance(problem, PagedAttention) else None
    shown = None if mask is None else shown_draft_tokens(mask[request : request + 1].to(torch.int32))
    (visible,) = visible_to(range(q_len), q_len, kv_len, problem, shown, problem.query.device)
    return visible


def _shortened(found: Sequence[str]) -> list[str]:
    left_out = len(found) - MOST_SHOWN
    return [*found[:MOST_SHOWN], *([f"and {left_out} more"] if left_out > 0 else [])]
