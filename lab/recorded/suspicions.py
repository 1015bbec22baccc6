"""Find suspicious inputs of a recorded call, and the inputs that caused non-finite outputs. Neither changes a verdict."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lab.calls import PagedAttention, Problem
from lab.calls.entries import places_of, selections_of
from lab.calls.problem import NVFP4, shown_draft_tokens
from lab.references.softmax_attention import visible_to
from lab.wording import first_few

MOST_SHOWN = 6


@dataclass(frozen=True, eq=False)
class RecordedInputs:
    """The inputs of a recorded call, or of one K/V head of a block-sparse call."""

    problem: Problem
    histories: Sequence[tuple[torch.Tensor, torch.Tensor]]  #: K and V of all requests
    pages: Sequence[int] | None = None  #: the engine's id of each page of the problem's cache; None: the problem's ids
    first_kv_head: int = 0  #: the number of the problem's first K/V head in the call

    def suspicions(self) -> list[str]:
        """Return sentences on zero scales, padding rows, partly filled pages where several requests end, and non-finite K/V."""
        problem, end = self.problem, self.problem.row_offsets()[-1]
        scales = {"bmm1_scale": "all weights equal", "bmm2_scale": "the output zero"}
        found = [f"{name} is 0, which makes {what}" for name, what in scales.items() if not getattr(problem, name)]
        if end < problem.num_rows:
            found.append(f"rows {end} to {problem.num_rows - 1} of the query belong to no request")
        if isinstance(problem, PagedAttention) and problem.selected is None:
            ends = problem.seq_lens.long()
            partly = (ends % problem.page_size).nonzero().flatten()  # requests whose last page has free slots
            last_pages = places_of(problem, partly, ends[partly] - 1)[0] // problem.page_size
            for page in last_pages.unique().tolist():
                if len(owners := partly[last_pages == page].tolist()) > 1:
                    several = f"requests {', '.join(map(str, owners))}: each of them writes its next key into it"
                    found.append(f"page {self._id(page)} is the last page of {several}")
        for request in range(problem.batch_size):
            if keys := self._non_finite(request):
                words = self._words(request, *keys[0])
                found.append(f"{words}, one of {len(keys)} non-finite keys of the request")
        return first_few(found, MOST_SHOWN)

    def origins_of_non_finite(self, out: torch.Tensor) -> list[str]:
        """Return sentences on why each request's first non-finite row in `out` [rows, heads, v_head_dim] is not finite."""
        problem, found = self.problem, []
        bad = ~out.to(torch.float32).isfinite().all(dim=-1)
        for request, (start, end) in enumerate(itertools.pairwise(problem.row_offsets())):
            for row, head in bad[start:end].nonzero().tolist()[:1]:
                seen = visible_of_request(problem, request, end - start, len(self.histories[request][0]))[row]
                place = f"row {start + row} (request {request}) head {head + self.first_kv_head * problem.group}"
                is_given = not bool(problem.query[start + row, head].to(torch.float32).isfinite().all())
                why = "so is its query" if is_given else self._origin(request, seen, head // problem.group)
                found.append(f"{place} is not finite: {why}")
        return first_few(found, MOST_SHOWN)

    def _origin(self, request: int, seen: torch.Tensor, kv_head: int) -> str:
        problem, keys = self.problem, [key for key in self._non_finite(request) if key[2] == kv_head]
        for side, token, _ in sorted(keys, key=lambda key: not seen[key[1]]):
            words = self._words(request, side, token, kv_head).replace(" holds", ", which holds")
            return f"{'it sees' if seen[token] else 'it must not see'} {words}"
        if isinstance(problem, PagedAttention) and problem.selected is None and len(seen) % problem.page_size:
            for side, cache in enumerate(() if problem.kv_dtype == NVFP4 else problem.kv):
                page, slot = self._place(request, side, len(seen) - 1)
                if not bool(cache[page, :, slot + 1 :].to(torch.float32).isfinite().all()):
                    where = f"page {self._id(page)} holds a non-finite {'KV'[side]}"
                    return f"{where} after the request's last key, which no row sees"
        return "the keys and values that it sees are finite"

    def _non_finite(self, request: int) -> list[tuple[int, int, int]]:
        return [  # the side (0: K, 1: V), index among the keys of the request, and head of each vector
            (side, token, head)
            for side, values in enumerate(self.histories[request])
            for token, head in (~values.to(torch.float32).isfinite()).any(dim=-1).nonzero().tolist()
        ]

    def _words(self, request: int, side: int, token: int, head: int) -> str:
        vector, where = self.histories[request][side][token, head].to(torch.float32), ""
        if isinstance(self.problem, PagedAttention):
            page, slot = self._place(request, side, token)
            where = f" (page {self._id(page)}, slot {slot})"
        key = f"{'KV'[side]} of request {request}, key {token}{where}, K/V head {self.first_kv_head + head}"
        return f"{key} holds {float(vector[~vector.isfinite()][0])}"

    def _place(self, request: int, side: int, token: int) -> tuple[int, int]:
        assert isinstance(self.problem, PagedAttention)
        at = torch.tensor([[request], [token]], device=self.problem.query.device)
        return divmod(int(places_of(self.problem, *at)[side]), self.problem.page_size)

    def _id(self, page: int) -> int:
        return page if self.pages is None else self.pages[page]


def visible_of_request(problem: Problem, request: int, q_len: int, kv_len: int) -> torch.Tensor:
    """Return which keys of a request each row sees, bool [q_len, kv_len]. In a sparse call, a key is a selected entry."""
    keys, shown = torch.arange(kv_len, device=problem.query.device), None
    if isinstance(problem, PagedAttention):
        if problem.selected is not None:
            ((_, indices),) = selections_of(problem, [request])
            return (indices.unsqueeze(2) == keys).any(dim=1)
        if problem.num_visible is not None:
            start = problem.row_offsets()[request]
            return keys < problem.num_visible[start : start + q_len, None]
        if problem.mask is not None:
            shown = shown_draft_tokens(problem.mask[request : request + 1].to(torch.int32))
    causal, window_left = problem.causal, problem.window_left
    return visible_to(range(q_len), q_len, kv_len, shown, keys.device, causal=causal, window_left=window_left)[0]
