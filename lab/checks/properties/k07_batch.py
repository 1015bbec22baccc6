"""A request whose output depends on other requests: wrong batch strides, exchanged lengths, rows or tables.

If a test has equal lengths and one table, an exchanged request is often right by chance. Here each request is computed alone,
in another order, and twice in a batch. If the data of one request change, no bit of another request's output may change.
Finally, all requests share their first pages, like requests with a cached prefix.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lab.checks.case_run import CaseRun
from lab.checks.properties.check import Check, Scope, itself
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs
from lab.workloads.inputs.ragged import joined

SHARED_PAGES = 2


def _judge(run: CaseRun) -> None:
    inputs = run.build()
    together = run.call(inputs)
    run.expect_close("together", together, inputs.truth())
    count = len(run.case.kv_lens)
    parts = {f"request {request} alone": [request] for request in range(count)}
    parts["in reversed order"] = [*reversed(range(count))]
    parts["with each request twice"] = [*range(count), *range(count)]
    for what, requests in parts.items():
        part = select(inputs, requests)
        run.vary(what, part, part.truth())
    _others_keep_their_bits(run, inputs)
    shared = _with_shared_prefix(inputs)
    run.vary("a shared prefix", shared, shared.truth())


def _others_keep_their_bits(run: CaseRun, inputs: AttentionInputs) -> None:
    rows = run.case.q_lens[0]
    query = inputs.query.clone()
    query[:rows] *= -2.0
    before, after = run.again(inputs), run.vary("another query", replace(inputs, query=query))
    if after is not None:
        kept, others = (result._replace(out=result.out[rows:]) for result in (before, after))
        run.expect_equal_bits("the other requests, when the first's query changed", others, kept)


def _with_shared_prefix(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs changed such that all requests begin with the same full pages: the first pages of the longest request,
    at most `SHARED_PAGES`.
    """
    page_size = inputs.case.page_size
    lengths = inputs.case.kv_lens
    donor = max(range(len(lengths)), key=lambda request: lengths[request])
    pages = min(SHARED_PAGES, lengths[donor] // page_size)
    block_tables = inputs.block_tables.clone()
    block_tables[:, :pages] = inputs.block_tables[donor, :pages]
    tokens, (keys, values) = pages * page_size, inputs.histories[donor]
    histories = tuple(
        (joined((keys[:tokens][: len(k)], k[tokens:])), joined((values[:tokens][: len(v)], v[tokens:])))
        for k, v in inputs.histories
    )
    return replace(inputs, block_tables=block_tables, histories=histories)


def select(inputs: AttentionInputs, requests: Sequence[int]) -> AttentionInputs:
    """Return the inputs of a call with the requests of these indices, in this order. An index may repeat."""
    case = inputs.case
    starts = [sum(case.q_lens[:request]) for request in range(len(case.q_lens))]
    rows = [torch.arange(starts[request], starts[request] + case.q_lens[request]) for request in requests]
    index = torch.tensor(list(requests), device=inputs.query.device)
    return replace(
        inputs,
        case=replace(
            case,
            kv_lens=tuple(case.kv_lens[request] for request in requests),
            q_lens=tuple(case.q_lens[request] for request in requests),
        ),
        query=inputs.query[torch.cat(rows).to(inputs.query.device)],
        histories=tuple(inputs.histories[request] for request in requests),
        block_tables=inputs.block_tables[index],
        seq_lens=inputs.seq_lens[index],
        selected=None if inputs.selected is None else tuple(inputs.selected[request] for request in requests),
    )


def _cases(scope: Scope) -> Iterator[AttentionCase]:
    yield from scope.balanced(4, 24, seed=9)
    yield from scope.balanced_top_k(1, 12, seed=48)


CHECK = Check("K7", "batch", __doc__, _cases, _judge, drawn=itself)
