"""Read each request's K and V, and compute the expected results (`Truth`) of query rows from them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from lab.calls import PagedAttention, Problem, RaggedAttention
from lab.calls.entries import places_of_requests
from lab.calls.problem import E4M3, shown_draft_tokens
from lab.references.errors import Truth
from lab.references.quantization import deinterleave_v_scale_factors, dequantize_nvfp4
from lab.references.softmax_attention import History, Rules, rounded, saturated, solved_requests


def truth_of_problem(
    problem: Problem,
    arithmetic: torch.dtype | None = None,
    *,
    requests: Sequence[int] | None = None,
    histories: Sequence[History] | None = None,
) -> Truth:
    """Return the expected results of a checked problem, whose K and V are read through its page tables or offsets: the output
    and LSE in float64, and the control. At least one request must have query rows.

    Args:
        arithmetic: dtype of the operands in the control, the low-precision attention whose error bounds a kernel's error; None:
            the query's dtype, or e4m3 if the query has one scale per block.
        requests: the requests whose rows are computed, in this order; None: all.
        histories: the result of `histories_of` for the same requests; None: it is computed. Ignored if K/V heads or rows select
            keys.
    """
    if arithmetic is None and isinstance(problem, RaggedAttention) and problem.block_scales is not None:
        arithmetic = E4M3
    problem = problem.simplified()
    if len(of_heads := problem.of_kv_heads()) > 1:
        return Truth.of_heads([truth_of_problem(each, arithmetic, requests=requests) for each in of_heads])
    chosen = range(problem.batch_size) if requests is None else requests
    if selects_keys(problem):
        truth = truth_of_problem(problem.of_rows(), arithmetic, requests=rows_of(problem, chosen).tolist())
        q_lens = problem.q_lens()
        return with_requests(truth, [q_lens[request] for request in chosen])
    return truth_of_requests(*inputs_of(problem, chosen, arithmetic, histories))


def selects_keys(problem: Problem) -> TypeGuard[PagedAttention]:
    """Return True if query rows select keys, or see a number of keys of their own."""
    return problem.selected is not None or problem.num_visible is not None


def inputs_of(
    problem: Problem,
    requests: Sequence[int],
    arithmetic: torch.dtype | None = None,
    histories: Sequence[History] | None = None,
) -> tuple[Tensor, list[History], list[int], Rules]:
    """Return the arguments of `truth_of_requests` for some requests of a problem, none of whose rows select keys."""
    q_lens, query = problem.q_lens(), problem.query[rows_of(problem, requests)]
    shown = None if problem.mask is None else shown_draft_tokens(problem.mask.to(torch.int32)[list(requests)])
    read = histories_of(problem, requests) if histories is None else list(histories)
    return query, read, [q_lens[request] for request in requests], Rules.of(problem, arithmetic, shown)


def rows_of(problem: Problem, requests: Sequence[int]) -> Tensor:
    """Return the indices of the requests' query rows, int64 on the query's device."""
    offsets = problem.row_offsets()
    rows = [row for request in requests for row in range(offsets[request], offsets[request + 1])]
    return torch.tensor(rows, dtype=torch.int64, device=problem.query.device)


def histories_of(problem: Problem, requests: Sequence[int] | None = None) -> list[History]:
    """Return one tuple (K, V) per request (`requests` None: of all), both [kv_len, num_kv_heads, head_dim], read through the
    problem's page tables or offsets. If query rows select cache entries, K and V have only the selected entries.
    """
    chosen, problem = range(problem.batch_size) if requests is None else requests, problem.simplified()
    if isinstance(problem, RaggedAttention):
        parts = problem.parts()
        return [parts[request] for request in chosen]
    v_factors = problem.v_scale_factors
    if v_factors is not None and problem.v_scale_factors_interleaved:
        v_factors = deinterleave_v_scale_factors(v_factors.view(torch.uint8)).view(E4M3)
    if not (of_requests := places_of_requests(problem, chosen)):
        return []
    lens, page_size = [len(places) for places, _ in of_requests], problem.page_size
    k_places, v_places = (torch.cat(places) for places in zip(*of_requests, strict=True))  # few launches on a GPU
    keys = _entries(problem.k_cache, problem.k_scale_factors, k_places, page_size)
    values = _entries(problem.v_cache, v_factors, v_places, page_size)
    return list(zip(keys.split(lens), values.split(lens), strict=True))


def _entries(cache: Tensor, scale_factors: Tensor | None, places: Tensor, page_size: int) -> Tensor:
    slots = places // page_size, slice(None), places % page_size
    entries = cache[slots]
    if scale_factors is None:
        return entries
    return dequantize_nvfp4(entries, scale_factors[slots]).to(torch.float32)  # exact: of six bits


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
    [kv_len, num_kv_heads] per request. For a head, a request has only these keys. Its query rows belong to the last of them.
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
    values in e4m3 or NVFP4 the mean error was at most 2.0e-3 in bfloat16. A bmm2_scale of a power of two rounds nothing.
    """
    is_quantised = any(values.dtype != query.dtype for _, values in histories)
    is_power_of_two = abs(math.frexp(float(rules.bmm2_scale))[0]) == 0.5
    return torch.finfo(rules.arithmetic).eps / 4 if is_quantised and not is_power_of_two else 0.0
