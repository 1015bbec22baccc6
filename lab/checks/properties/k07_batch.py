"""A request whose output depends on other requests: wrong batch strides, exchanged lengths, rows or tables.

If a test has equal lengths and one table, an exchanged request is often right by chance. Here each request is computed alone,
in another order, and twice in a batch. If the data of one request change, no bit of another request's output may change.
Finally, all requests share their first pages, like requests with a cached prefix.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lab.checks.case_run import CaseRun
from lab.checks.properties.check import Check, balanced_cases, itself
from lab.checks.properties.variants import Variant, part
from lab.workloads.inputs.attention import AttentionInputs
from lab.workloads.inputs.call import CallInputs
from lab.workloads.inputs.encoding import raw
from lab.workloads.inputs.ragged import RaggedInputs, joined

SHARED_PAGES = 2


def _judge(run: CaseRun) -> None:
    inputs = run.build()
    together = run.call(inputs)
    run.expect_close("together", together, inputs.truth())
    alone = [part(inputs, f"request {request} alone", [request]) for request in range(1, len(inputs.q_lens))]
    for variant in (*batch_sizes(inputs), *positions(inputs), *alone):
        run.vary(variant.what, variant.inputs, variant.inputs.truth())
    before = run.again(inputs)
    for variant in neighbours(inputs):
        assert variant.rows is not None
        after, same = run.vary(variant.what, variant.inputs), variant.rows >= 0
        if after is not None and after.out.shape == before.out.shape:
            kept, others = (result._replace(out=result.out[same]) for result in (before, after))
            run.expect_equal_bits(f"the other requests, with {variant.what}", others, kept)
    if inputs.seen is None:  # K/V heads that select pages of their own have no common prefix
        shared = _with_shared_prefix(inputs)
        run.vary("a shared prefix", shared, shared.truth())


def batch_sizes(inputs: CallInputs, times: Sequence[int] = (2,)) -> Iterator[Variant]:
    """Yield calls with other numbers of requests: the first alone, and all of them several times."""
    yield part(inputs, "request 0 alone", [0])
    every = range(len(inputs.q_lens))
    for each in times:
        yield part(inputs, f"each request {each} times, one batch after another", [*every] * each)


def positions(inputs: CallInputs) -> Iterator[Variant]:
    """Yield calls with the same requests at other places in the batch."""
    every = range(len(inputs.q_lens))
    yield part(inputs, "requests in reversed order", every[::-1])
    yield part(inputs, "request 0 after the others", [*every[1:], 0])


def neighbours(inputs: CallInputs) -> Iterator[Variant]:
    """Yield calls in which other requests have other queries, keys and values: first request 0, then all but request 0."""
    every = range(len(inputs.q_lens))
    for what, changed in (
        ("other contents of request 0", every[:1]),
        ("other contents of all but request 0", every[1:]),
    ):
        same = part(inputs, what, every)
        assert same.rows is not None
        first = inputs.q_lens[0]
        of_changed = slice(0, first) if 0 in changed else slice(first, None)
        query, rows = inputs.query.clone(), same.rows.clone()
        raw(query)[of_changed] = raw(query)[of_changed].roll(1, -1)
        rows[of_changed] = -1
        yield replace(same, inputs=_with_rolled_keys(replace(inputs, query=query), changed), rows=rows)


def _with_rolled_keys(inputs: CallInputs, requests: Sequence[int]) -> CallInputs:
    """Return the inputs with the elements of each key and value of some requests moved by one place. In a paged call their
    histories are those of before.
    """
    if isinstance(inputs, RaggedInputs):
        parts = [*inputs.parts]
        for request in requests:
            keys, values = (raw(side).roll(1, -1).view(side.dtype) for side in parts[request])
            parts[request] = keys, values
        return replace(inputs, parts=parts)
    size, pools = inputs.case.page_size, []
    for pages in (inputs.k_pages,) if inputs.v_pages is inputs.k_pages else (inputs.k_pages, inputs.v_pages):
        pools.append(pages.clone())
        for request in requests:
            tables = inputs.block_tables[..., request, :].view(-1, inputs.block_tables.shape[-1])
            for table, length in zip(tables, inputs.seq_lens[..., request].flatten().tolist(), strict=True):
                own = table[: -(-length // size)].long()
                raw(pools[-1])[own] = raw(pages)[own].roll(1, -1)
    return replace(inputs, k_pages=pools[0], v_pages=pools[-1])


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


CHECK = Check("K7", "batch", __doc__, balanced_cases(4, 24, seed=9), _judge, drawn=itself)
