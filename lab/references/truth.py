"""The expected results (`Truth`) of query rows, computed from each request's K/V history, and their control."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lab.calls import Problem
from lab.calls.problem import Softmax
from lab.references.errors import Truth
from lab.references.softmax_attention import (
    PIECE_ELEMENTS,
    rounded,
    saturated,
    skippable,
    stacked,
    unchecked_attention,
    unchecked_eager_attention,
    visible_to,
)

History = tuple[Tensor, Tensor]  # K and V of a request, [kv_len, num_kv_heads, head_dim]
# K and V of requests that are computed together are copied, so they have at most 1 / TOGETHER of `PIECE_ELEMENTS`.
TOGETHER = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class Rules(Softmax):
    """How the rows of requests attend to keys: the masks, the softmax's scales and sinks, and the dtypes."""

    arithmetic: torch.dtype  #: dtype of the control's operands
    out_dtype: torch.dtype  #: dtype of the output
    window_left: int = -1  #: number of keys before its own position that a row sees; -1 for all
    causal: bool = True  #: False: every row sees every key
    #: threshold of the weights that a kernel may leave out, as in `AttentionProblem`; 0 for none
    skip_softmax: float = 0.0
    #: bool [num_requests, q_len, q_len] or None: a draft mask, the keys that each row sees among its request's last q_len keys.
    #: It replaces the causal rule.
    shown: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, arithmetic: torch.dtype | None = None, shown: Tensor | None = None) -> "Rules":
        """Return the rules of a problem. `arithmetic` None is the query's dtype, or float32 for float64."""
        dtype = problem.query.dtype if arithmetic is None else arithmetic
        return cls(
            **problem.terms(),
            arithmetic=torch.float32 if dtype == torch.float64 else dtype,
            out_dtype=problem.out_dtype,
            window_left=problem.window_left,
            causal=problem.causal,
            skip_softmax=problem.skip_softmax,
            shown=shown,
        )


def truth_of_requests(query: Tensor, histories: list[History], q_lens: list[int], rules: Rules) -> Truth:
    """Return the expected results of the rows of consecutive requests.

    Args:
        query: [num_rows, num_qo_heads, head_dim]. Rows after the requests' rows are padding, without expected results.
        histories: (K, V) of each request, [kv_len, num_kv_heads, head_dim]. V's head_dim may differ from K's.
        q_lens: number of query rows of each request, which belong to its newest tokens.
    """
    pieces = list(solved_requests(query, histories, q_lens, rules, with_control=True))
    places, exact, lse_log2, control, skipped = map(torch.cat, zip(*pieces, strict=True))
    order = places.argsort()
    request_of_row = requests_of_rows(q_lens, query.device)
    shared_error = _error_of_scaled_values(query, histories, rules)
    expected, control = saturated(exact[order], rules.out_dtype), rounded(control[order], rules.out_dtype)
    return Truth(expected, control, lse_log2[order], request_of_row, rules.arithmetic, shared_error, skipped[order])


def requests_of_rows(q_lens: Sequence[int], device: torch.device) -> Tensor:
    return torch.arange(len(q_lens), device=device).repeat_interleave(torch.tensor(q_lens, device=device))


def truth_of_selected(query: Tensor, histories: Sequence[History], selected: Sequence[Tensor], rules: Rules) -> Truth:
    """Return the expected results of rows that attend only to `selected` positions, int64 [q_len, num_columns] per request,
    negative for none. A key that is selected twice counts twice.
    """
    of_rows = [
        (keys[row[row >= 0]], values[row[row >= 0]])
        for (keys, values), rows in zip(histories, selected, strict=True)
        for row in rows
    ]
    truth = truth_of_requests(query[: len(of_rows)], of_rows, [1] * len(of_rows), rules)
    return with_requests(truth, [len(rows) for rows in selected])


def with_requests(truth: Truth, q_lens: Sequence[int]) -> Truth:
    """Return `truth`, computed with each row as its own request, regrouped: request i has the next `q_lens[i]` rows."""
    return replace(truth, request_of_row=requests_of_rows(q_lens, truth.expected.device))


def truth_of_heads(
    query: Tensor, histories: Sequence[History], seen: Sequence[Tensor], q_lens: list[int], rules: Rules
) -> Truth:
    """Return the expected results of a block-sparse call, in which each K/V head sees only the keys `seen`, bool [kv_len,
    num_kv_heads] per request. A row's position is its index among these keys.
    """
    num_kv_heads = seen[0].shape[1]
    parts = []
    for head, rows in enumerate(query.split(query.shape[1] // num_kv_heads, dim=1)):
        of_head = [
            (keys[own[:, head], head : head + 1], values[own[:, head], head : head + 1])
            for (keys, values), own in zip(histories, seen, strict=True)
        ]
        sinks = None if rules.sinks is None else rules.sinks.chunk(num_kv_heads)[head]
        parts.append(truth_of_requests(rows, of_head, q_lens, replace(rules, sinks=sinks)))
    return Truth.of_heads(parts)


def _error_of_scaled_values(query: Tensor, histories: list[History], rules: Rules) -> float:
    """Return the largest relative bias of a right kernel that multiplies a quantised cache's values by bmm2_scale and rounds
    the products: half of the largest rounding error.

    A quantised cache's values have few different mantissas, so their roundings do not average out: with normally distributed
    values in e4m3 or NVFP4 the mean error was at most 2.0e-3 in bfloat16. A power of two causes no rounding.
    """
    is_quantised = any(values.dtype != query.dtype for _, values in histories)
    is_power_of_two = abs(math.frexp(float(rules.bmm2_scale))[0]) == 0.5
    return torch.finfo(rules.arithmetic).eps / 4 if is_quantised and not is_power_of_two else 0.0


def solved_requests(
    query: Tensor,
    histories: Sequence[History],
    q_lens: Sequence[int],
    rules: Rules,
    *,
    with_control: bool = False,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]]:
    """Compute attention of the rows of consecutive requests, one piece at a time.

    Yields:
        For each piece: (index of each row in the query, int64 [rows]; output, float64 [rows, num_qo_heads, v_head_dim]; LSE in
        base 2, float64 [rows, num_qo_heads]; control, float32; `Truth.skipped`), the last two None unless `with_control`.
    """
    row_ids = torch.arange(sum(q_lens), device=query.device).split(list(q_lens))
    most = PIECE_ELEMENTS[query.device.type]
    for requests in _together(query, histories, q_lens, most // TOGETHER):
        rows_of_each, q_len = torch.stack([row_ids[request] for request in requests]), q_lens[requests[0]]
        shown = None if rules.shown is None else torch.stack([rules.shown[request] for request in requests])
        keys, values = stacked([histories[request] for request in requests])
        rows_at_once = max(1, most // (query.shape[1] * max(keys.shape[1], 1)))
        for start in range(0, q_len, rows_at_once):
            rows = range(start, min(start + rows_at_once, q_len))
            visible = visible_to(
                rows, q_len, keys.shape[1], shown, query.device, causal=rules.causal, window_left=rules.window_left
            ).expand(len(requests), -1, -1)
            place, last = rows_of_each[:, rows.start : rows.stop], visible.shape[2]
            inputs = query[place], keys[:, :last], values[:, :last], visible, rules
            out, lse_log2 = unchecked_attention(*inputs)
            control = skipped = None
            if with_control:
                control = unchecked_eager_attention(*inputs, rules.arithmetic).flatten(0, 1)
                threshold = rules.skip_softmax / max(keys.shape[1], 1)
                skipped = skippable(*inputs, rules.arithmetic, threshold, out).flatten(0, 1)
            yield place.flatten(), out.flatten(0, 1), lse_log2.flatten(0, 1), control, skipped


def _together(query: Tensor, histories: Sequence[History], q_lens: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield requests of the same numbers of keys and rows, together at most `most` elements of K and V or of scores."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for request, ((keys, _), q_len) in enumerate(zip(histories, q_lens, strict=True)):
        if q_len:
            by_size.setdefault((len(keys), q_len), []).append(request)
    for (kv_len, q_len), requests in by_size.items():
        elements = max(sum(side.numel() for side in histories[requests[0]]), kv_len * q_len * query.shape[1], 1)
        at_once = max(1, most // elements)
        yield from (requests[first : first + at_once] for first in range(0, len(requests), at_once))
