"""Compute the expected results (`Truth`) of query rows from each request's K and V."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lab.references.errors import Truth
from lab.references.softmax_attention import History, Rules, rounded, saturated, solved_requests


def truth_of_requests(query: Tensor, histories: list[History], q_lens: list[int], rules: Rules) -> Truth:
    """Return the expected results of the query rows of consecutive requests.

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
    """Return the expected results of query rows that attend only to `selected` keys. `selected` has, for each request, key
    positions int64 [q_len, num_columns]; a negative number is no key, and a key that occurs twice counts twice.
    """
    of_rows = [
        (keys[row[row >= 0]], values[row[row >= 0]])
        for (keys, values), rows in zip(histories, selected, strict=True)
        for row in rows
    ]
    truth = truth_of_requests(query[: len(of_rows)], of_rows, [1] * len(of_rows), rules)
    return with_requests(truth, [len(rows) for rows in selected])


def with_requests(truth: Truth, q_lens: Sequence[int]) -> Truth:
    """Return `truth` with other requests: its first `q_lens[0]` rows are of request 0, the next `q_lens[1]` of request 1."""
    return replace(truth, request_of_row=requests_of_rows(q_lens, truth.expected.device))


def truth_of_heads(
    query: Tensor, histories: Sequence[History], seen: Sequence[Tensor], q_lens: list[int], rules: Rules
) -> Truth:
    """Return the expected results of a block-sparse call, in which each K/V head sees only the keys where `seen` is True: bool
    [kv_len, num_kv_heads] per request. For each head, the other keys are removed; the rows are at the last remaining keys.
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
    """Return the largest relative bias of a right kernel that multiplies a quantised cache's values by bmm2_scale and
    rounds the products: half of the largest relative error of a rounding; 0 if bmm2_scale is a power of two (no rounding).

    A quantised cache's values have few different mantissas, so their roundings do not average out: with normally distributed
    values in e4m3 or NVFP4 the mean error was at most 2.0e-3 in bfloat16. For a cache that is not quantised, return 0.
    """
    is_quantised = any(values.dtype != query.dtype for _, values in histories)
    is_power_of_two = abs(math.frexp(float(rules.bmm2_scale))[0]) == 0.5
    return torch.finfo(rules.arithmetic).eps / 4 if is_quantised and not is_power_of_two else 0.0
