"""The expected results of rows or K/V heads that see selected keys of their request, instead of all keys up to a position."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from lab.references.errors import Truth
from lab.references.softmax_attention import Rules, requests_of_rows, truth_of_requests


def truth_of_selected(
    query: Tensor, histories: Sequence[tuple[Tensor, Tensor]], selected: Sequence[Tensor], rules: Rules
) -> Truth:
    """Return the expected results of the rows of consecutive requests. Each row attends to the keys that it selects, as if it
    were a request with no other keys.

    Args:
        query: [num_rows, num_qo_heads, head_dim].
        histories: (K, V) of each request, [kv_len, num_kv_heads, head_dim].
        selected: for each request the positions of keys that its rows select, int64 [q_len, num_columns]. A negative number is
            no key; a key that is selected twice counts twice.
        rules: scales, sinks and dtypes.
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
    """Return the expected results of the rows of consecutive requests. To each K/V head, the keys that it sees are the whole
    request.

    Args:
        query, histories, q_lens, rules: as in `lab.references.softmax_attention.truth_of_requests`.
        seen: the keys of each request that K/V heads see, bool [kv_len, num_kv_heads].
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
