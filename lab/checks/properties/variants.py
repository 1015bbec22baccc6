"""Define variants of a call. A variant differs from the call in one factor, such as the batch size, on which no result of a row
should depend.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, repeat
from typing import Any

import torch
from torch import Tensor

from lab.checks.case_run import CaseRun, GivenCall, Result
from lab.workloads.inputs.call import CallInputs
from lab.workloads.inputs.ragged import RaggedInputs
from lab.workloads.inputs.selection import lengths_of_heads

# Returns a function that makes a call of the case, eagerly or by a replay of a CUDA graph.
Maker = Callable[[CaseRun, GivenCall], Callable[[], Result]]


def made_again(run: CaseRun, call: GivenCall) -> Callable[[], Result]:
    """Return a function that makes the call eagerly. A refusal raises Unsupported in the first call, KernelError later."""
    calls = chain((run.call,), repeat(run.again))
    return lambda: next(calls)(call)


@dataclass(frozen=True, eq=False)
class Variant:
    """A call that differs from a base call in one factor, such as the batch size. Results of the same rows should be equal."""

    what: str  #: the difference in words, such as "request 0 alone"
    inputs: CallInputs  #: the tensors of the call
    changes: dict[str, Any] = field(default_factory=dict)  #: arguments that replace arguments of `inputs`
    #: int64 [num_rows]: for each row the index of the base call's row with the same expected result, or -1. None: equal rows
    rows: Tensor | None = None
    make: Maker = made_again


def part(inputs: CallInputs, what: str, requests: Sequence[int], rows: Sequence[range] | None = None) -> Variant:
    """Return the base call with some of its requests, in any order, or with some query rows of the requests.

    Args:
        requests: indexes of requests of the base call, which may repeat.
        rows: the range of query rows of each request; None for all rows. A request keeps the keys up to its last row.

    If requests are repeated, so that the call has more rows than the base call, `Variant.rows` is -1 for the additional rows.
    """
    count, starts = len(inputs.query), [0, *accumulate(inputs.q_lens)]
    kept = rows or [range(inputs.q_lens[request]) for request in requests]
    lens = tuple(inputs.kv_lens[r] - inputs.q_lens[r] + each.stop for r, each in zip(requests, kept, strict=True))
    found = [starts[request] + row for request, each in zip(requests, kept, strict=True) for row in each]
    index = torch.tensor(found, dtype=torch.int64, device=inputs.query.device)
    query, q_lens = inputs.query[index], tuple(map(len, kept))
    sides = inputs.parts if isinstance(inputs, RaggedInputs) else inputs.histories
    histories = [(sides[request][0][:n], sides[request][1][:n]) for request, n in zip(requests, lens, strict=True)]
    of_base = index.where(torch.arange(len(index), device=index.device) < count, -1)
    if isinstance(inputs, RaggedInputs):
        return Variant(what, replace(inputs, query=query, q_lens=q_lens, parts=histories), rows=of_base)
    selected, seen = inputs.selected, inputs.seen
    if seen is not None:  # a row sees the keys of its head up to as many before the last as there are later rows
        later = [inputs.q_lens[request] - each.stop for request, each in zip(requests, kept, strict=True)]
        seen = tuple(_but_last(seen[r], rows_after)[:n] for r, rows_after, n in zip(requests, later, lens, strict=True))
    chosen = replace(
        inputs,
        case=replace(inputs.case, kv_lens=lens, q_lens=q_lens),
        query=query,
        histories=tuple(histories),
        block_tables=inputs.block_tables[..., torch.tensor(list(requests), device=query.device), :],
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=query.device) if seen is None else lengths_of_heads(seen),
        seen=seen,
        selected=selected
        and tuple(selected[r][each.start : each.stop] for r, each in zip(requests, kept, strict=True)),
    )
    return Variant(what, chosen, rows=of_base)


def _but_last(seen: Tensor, count: int) -> Tensor:
    return seen & (seen.flip(0).cumsum(0).flip(0) > count)
