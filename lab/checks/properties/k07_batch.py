"""Find a request whose output depends on other requests: wrong batch strides, exchanged lengths, rows or page tables.

In a test with equal lengths and one page table, an exchanged request is often right by chance. Here each request is computed
alone, in another order, and twice in a batch. A change of one request's query must not change a bit of another request's
output. Finally, all requests share their first two pages, or one and two pages in turn, like requests with a cached prefix. A
batch of one request, twice, shares all pages, also those of its newest tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lab.checks.case_run import CaseRun
from lab.checks.properties.check import Check, itself
from lab.checks.properties.variants import Variant, part
from lab.references.softmax_attention import rounded
from lab.workloads.inputs.attention import AttentionInputs
from lab.workloads.inputs.call import CallInputs


def _judge(run: CaseRun) -> None:
    inputs, *_ = run.base_call("together")
    alone = [part(inputs, f"request {request} alone", [request]) for request in range(1, len(inputs.q_lens))]
    twice = part(inputs, "the longest request twice, alone", [_longest(inputs)] * 2)
    for variant in (*batch_sizes(inputs), *positions(inputs), *alone, twice):
        run.vary(variant.what, variant.inputs, variant.inputs.truth())
    rows, variant = inputs.q_lens[0], another_query(inputs)
    before, after = run.again(inputs), run.vary(variant.what, variant.inputs)
    if after is not None:
        kept, others = (result._replace(out=result.out[rows:]) for result in (before, after))
        run.expect_equal_bits("the other requests, when the first's query changed", others, kept)
    if inputs.seen is None:  # K/V heads that select pages of their own have no common prefix
        order = sorted(range(len(inputs.kv_lens)), key=lambda request: -inputs.kv_lens[request])
        unequal = _with_shared_prefix(inputs, (1, 2))
        longest_first = part(unequal, "unequal shared prefixes, the longest request first", order)
        for variant in (Variant("a shared prefix", _with_shared_prefix(inputs, (2,))), longest_first):
            run.vary(variant.what, variant.inputs, variant.inputs.truth())


def batch_sizes(inputs: CallInputs, times: Sequence[int] = (2,)) -> Iterator[Variant]:
    """Yield calls with other batch sizes: request 0 alone, then for each n in `times` a batch with each request n times."""
    yield part(inputs, "request 0 alone", [0])
    every = range(len(inputs.q_lens))
    for each in times:
        yield part(inputs, f"the batch {each} times in one call", [*every] * each)


def positions(inputs: CallInputs) -> Iterator[Variant]:
    every = range(len(inputs.q_lens))
    yield part(inputs, "requests in reversed order", every[::-1])
    yield part(inputs, "request 0 after the others", [*every[1:], 0])


def another_query(inputs: CallInputs) -> Variant:
    """Return the call with another query of request 0. The results of all other requests must not depend on this query."""
    rows = inputs.q_lens[0]
    query, others = inputs.query.clone(), torch.arange(len(inputs.query), device=inputs.query.device)
    query[:rows] = rounded(query[:rows].to(torch.float32) * -2.0, query.dtype)
    others[:rows] = -1
    return Variant("another query of request 0", replace(inputs, query=query), rows=others)


def _longest(inputs: CallInputs) -> int:
    return max(range(len(inputs.kv_lens)), key=inputs.kv_lens.__getitem__)


def _with_shared_prefix(inputs: AttentionInputs, num_pages: Sequence[int]) -> AttentionInputs:
    page_size, lengths = inputs.case.page_size, inputs.kv_lens
    donor = _longest(inputs)
    block_tables, histories = inputs.block_tables.clone(), list[tuple[Tensor, Tensor]]()
    keys, values = inputs.histories[donor]
    for request, (k, v) in enumerate(inputs.histories):
        pages = min(num_pages[request % len(num_pages)], lengths[donor] // page_size)
        block_tables[request, :pages] = inputs.block_tables[donor, :pages]
        tokens = pages * page_size
        k, v = torch.cat((keys[:tokens][: len(k)], k[tokens:])), torch.cat((values[:tokens][: len(v)], v[tokens:]))
        histories.append((k, v))
    return replace(inputs, block_tables=block_tables, histories=tuple(histories))


CHECK = Check("K7", __doc__, lambda scope: scope.balanced(4, 24, seed=9), _judge, drawn=itself)
