"""The expected results (`Truth`) of query rows, computed from each request's K/V history, and their control."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lab.calls import Problem
from lab.calls.problem import E4M3, Softmax
from lab.references.errors import Truth
from lab.references.softmax_attention import (
    PIECE_ELEMENTS,
    rounded,
    saturated,
    skippable,
    unchecked_attention,
    unchecked_eager_attention,
    visible_keys,
    widened,
)

TOGETHER = 16  # requests that are computed together are a piece's 16th at most: they are copied for it


@dataclass(frozen=True, eq=False, kw_only=True)
class Rules(Softmax):
    """The rules of attention for the rows of a request: masks, the softmax's terms, and precision."""

    #: dtypes of the control's operands and of the output
    arithmetic: torch.dtype
    out_dtype: torch.dtype
    window_left: int = -1  #: how many keys before its own position a row sees; -1 for all
    causal: bool = True  #: False: every row sees every key
    #: factor of the weights that a kernel may leave out, as in `AttentionProblem`; 0 for none
    skip_softmax: float = 0.0
    #: bool [num_requests, q_len, q_len], the keys that each row sees among a request's last q_len keys. It replaces the causal
    #: rule; None: no such mask.
    shown: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, arithmetic: torch.dtype | None = None, shown: Tensor | None = None) -> "Rules":
        """Return the rules of a problem. The control's operands have the query's dtype, or float32 for float64."""
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


def truth_of_requests(query: Tensor, histories: list[tuple[Tensor, Tensor]], q_lens: list[int], rules: Rules) -> Truth:
    """Return the expected results of the rows of consecutive requests.

    Args:
        query: [num_rows, num_qo_heads, head_dim]. Rows after the requests' rows have no expected results.
        histories: (K, V) of each request, [kv_len, num_kv_heads, head_dim]. V's head_dim may differ from K's.
        q_lens: query rows of each request, which belong to its newest tokens.
        rules: how rows attend to keys.
    """
    pieces = list(solved_requests(query, histories, q_lens, rules, with_control=True))
    places, exact, lse_log2, control, skipped = map(torch.cat, zip(*pieces, strict=True))
    order = places.argsort()
    request_of_row = requests_of_rows(q_lens, query.device)
    shared_error = _error_of_scaled_values(query, histories, rules)
    expected, control = saturated(exact[order], rules.out_dtype), rounded(control[order], rules.out_dtype)
    return Truth(expected, control, lse_log2[order], request_of_row, rules.arithmetic, shared_error, skipped[order])


def requests_of_rows(q_lens: Sequence[int], device: torch.device) -> Tensor:
    """Return the request of each row, int64 [sum(q_lens)], if consecutive requests have `q_lens` rows."""
    return torch.arange(len(q_lens), device=device).repeat_interleave(torch.tensor(q_lens, device=device))


def truth_of_selected(
    query: Tensor, histories: Sequence[tuple[Tensor, Tensor]], selected: Sequence[Tensor], rules: Rules
) -> Truth:
    """Return the expected results of the rows of consecutive requests as `truth_of_requests` does. Each row attends to the keys
    that it selects, as if it were a request with no other keys: `selected` are their positions, int64 [q_len, num_columns] for
    each request. A negative number is no key; a key that is selected twice counts twice.
    """
    of_rows = [
        (keys[row[row >= 0]], values[row[row >= 0]])
        for (keys, values), rows in zip(histories, selected, strict=True)
        for row in rows
    ]
    truth = truth_of_requests(query[: len(of_rows)], of_rows, [1] * len(of_rows), rules)
    return with_requests(truth, [len(rows) for rows in selected])


def with_requests(truth: Truth, q_lens: Sequence[int]) -> Truth:
    """Return expected results that were computed with each row as a request, as those of requests with `q_lens` rows."""
    return replace(truth, request_of_row=requests_of_rows(q_lens, truth.expected.device))


def truth_of_heads(
    query: Tensor, histories: Sequence[tuple[Tensor, Tensor]], seen: Sequence[Tensor], q_lens: list[int], rules: Rules
) -> Truth:
    """Return the expected results of the rows of consecutive requests as `truth_of_requests` does. To each K/V head, the keys
    that it sees are the whole request: `seen` are these keys of each request, bool [kv_len, num_kv_heads].
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


def _error_of_scaled_values(query: Tensor, histories: list[tuple[Tensor, Tensor]], rules: Rules) -> float:
    """Return a relative error that all outputs may share: that of a kernel which multiplies a quantised cache's values by
    bmm2_scale and rounds the products.

    A quantised cache's values have few different mantissas, so their roundings do not average out. Half of the largest rounding
    error is allowed: with normally distributed values in e4m3 or NVFP4 and any bmm2_scale, the mean error was at most 2.0e-3 in
    bfloat16. A scale that is a power of two causes no rounding.
    """
    is_quantised = any(values.dtype != query.dtype for _, values in histories)
    is_power_of_two = abs(math.frexp(float(rules.bmm2_scale))[0]) == 0.5
    return torch.finfo(rules.arithmetic).eps / 4 if is_quantised and not is_power_of_two else 0.0


def solved_requests(
    query: Tensor,
    histories: Sequence[tuple[Tensor, Tensor]],
    q_lens: Sequence[int],
    rules: Rules,
    *,
    with_control: bool = False,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]]:
    """Compute attention of the rows of consecutive requests, one piece at a time: some rows of requests with equal numbers of
    keys and rows.

    Args:
        query, histories, q_lens, rules: as in `truth_of_requests`.
        with_control: compute the control too, and what `rules.skip_softmax` allows.

    Yields:
        The index of each row of the piece in the query, int64 [rows]; its output, float64 [rows, num_qo_heads, v_head_dim]; its
        LSE in base 2, float64 [rows, num_qo_heads]; the control, float32 in the output's shape, or None; and `Truth.skipped` of
        the rows, or None.
    """
    row_ids = torch.arange(sum(q_lens), device=query.device).split(list(q_lens))
    most = PIECE_ELEMENTS[query.device.type]
    for requests in _together(query, histories, q_lens, most // TOGETHER):
        keys, values = (_stacked([histories[request][side] for request in requests]) for side in (0, 1))
        shown = None if rules.shown is None else torch.stack([rules.shown[request] for request in requests])
        rows_of_each, q_len = torch.stack([row_ids[request] for request in requests]), q_lens[requests[0]]
        rows_at_once = max(1, most // (query.shape[1] * max(keys.shape[1], 1)))
        for start in range(0, q_len, rows_at_once):
            rows = range(start, min(start + rows_at_once, q_len))
            visible = visible_to(rows, q_len, keys.shape[1], rules, shown, query.device).expand(len(requests), -1, -1)
            place, last = rows_of_each[:, rows.start : rows.stop], visible.shape[2]
            inputs = query[place], keys[:, :last], values[:, :last], visible, rules
            out, lse_log2 = unchecked_attention(*inputs)
            control = skipped = None
            if with_control:
                control = unchecked_eager_attention(*inputs, rules.arithmetic).flatten(0, 1)
                threshold = rules.skip_softmax / max(keys.shape[1], 1)
                skipped = skippable(*inputs, rules.arithmetic, threshold, out).flatten(0, 1)
            yield place.flatten(), out.flatten(0, 1), lse_log2.flatten(0, 1), control, skipped


def _together(
    query: Tensor, histories: Sequence[tuple[Tensor, Tensor]], q_lens: Sequence[int], most: int
) -> Iterator[list[int]]:
    """Yield lists of requests to compute together. The requests of a list have equal numbers of keys and rows, and at most
    `most` elements of K and V or of scores. Requests without rows are left out.
    """
    by_size: dict[tuple[int, int], list[int]] = {}
    for request, ((keys, _), q_len) in enumerate(zip(histories, q_lens, strict=True)):
        if q_len:
            by_size.setdefault((len(keys), q_len), []).append(request)
    for (kv_len, q_len), requests in by_size.items():
        elements = max(sum(side.numel() for side in histories[requests[0]]), kv_len * q_len * query.shape[1], 1)
        at_once = max(1, most // elements)
        yield from (requests[first : first + at_once] for first in range(0, len(requests), at_once))


def visible_to(
    rows: range, q_len: int, kv_len: int, rules: Rules | Problem, shown: Tensor | None, device: torch.device
) -> Tensor:
    """Return the keys that rows of requests with equal lengths see, up to the last key that one of the rows may see.

    Args:
        rows: the rows' indices in a request of `q_len` rows and `kv_len` keys.
        rules: what says if the rows are causal and have a window.
        shown: the requests' part of `Rules.shown`, or None.

    Returns:
        bool [num_requests, len(rows), keys]; the first axis is 1 without `shown`.
    """
    first = kv_len - q_len  # position of a request's first row
    last = kv_len if shown is not None or not rules.causal else max(first + rows.stop, 0)
    visible = visible_keys(
        torch.arange(first + rows.start, first + rows.stop, device=device).unsqueeze(0),
        torch.arange(last, device=device).unsqueeze(0),
        torch.tensor([kv_len], device=device),
        causal=rules.causal and shown is None,
        window_left=rules.window_left,
    ).expand(1, len(rows), last)  # without a causal rule, all rows see the same
    if shown is None:
        return visible
    visible = visible.expand(len(shown), -1, -1).clone()
    visible[:, :, max(first, 0) :] &= shown[:, rows.start : rows.stop, max(-first, 0) :]
    return visible


def _stacked(sides: list[Tensor]) -> Tensor:
    """Stack K or V of several requests. One request's K or V is not copied, except e4m3, which becomes float32 once for all."""
    stacked = sides[0].unsqueeze(0) if len(sides) == 1 else torch.stack(sides)
    return widened(stacked, torch.float32) if stacked.dtype == E4M3 else stacked
