"""Wrong kernels of MLA decode, written without a look at the checks: numbers 460 to 549."""

import math
from dataclasses import replace
from types import SimpleNamespace

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, Memory, assuming_strides, mla_of

SPLIT_460 = 1024


class Blind460Model(Kernel):
    def start(self, run):
        super().start(run)
        buffer = run.call.multi_ctas_kv_counter_buffer
        run.counters = None
        if buffer is not None and buffer.is_contiguous():
            data = buffer.view(-1).view(torch.uint8)
            if data.numel() >= 4 * run.batch:
                run.counters = data[: 4 * run.batch].view(torch.int32)
        run.most = -(-run.p.max_kv_len // SPLIT_460)

    def request(self, run, r):
        n = -(-run.lens[r] // SPLIT_460)
        run.arrived = n
        if run.counters is not None and n > 1:
            count, run.arrived = int(run.counters[r]), 0
            for split in range(n):
                old, count = count, (0 if count >= run.most - 1 else count + 1)
                if old == n - 1:
                    run.arrived = split + 1
            run.counters[r] = count
        super().request(run, r)

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (keys < run.arrived * SPLIT_460)


trtllm_batch_decode_with_kv_cache_mla_460 = mla_of(Blind460Model())


@wrong(
    trigger=(
        "a multi_ctas_kv_counter_buffer, a request of more than 1,024 keys with fewer splits of 1,024 than "
        "max_seq_len has; a second call on the buffer (second call; the first leaves the buffer non-zero)"
    ),
)
class Blind460:
    """The counter of a request's splits wraps at the splits of max_seq_len, not at its own: a buffer of counters is
    left non-zero, and later calls merge too early or never.
    """

    trtllm_batch_decode_with_kv_cache_mla = staticmethod(trtllm_batch_decode_with_kv_cache_mla_460)


@wrong(mla_of, trigger="a live page id of 65,536 or more (small pages, large pool)")
class Blind487(Kernel):
    """Page ids are staged in shared memory as 16 bits: pages from 65,536 on are read as others."""

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side) & 0xFFFF


@wrong(
    mla_of,
    trigger=("a request with over 512 keys, with logits large enough (some 10 and more) for bf16 maxima to be off"),
)
class Blind488(Kernel):
    """The maxima of splits of 512 keys go through the workspace as bf16, while their sums are relative to the float32
    ones.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        if len(keys) <= 512:
            return super().partial(run, r, query, keys, values, seen, first_key)
        parts = []
        for i in range(0, len(keys), 512):
            own = slice(i, i + 512)
            acc, largest, total = super().partial(run, r, query, keys[own], values[own], seen[:, own], first_key + i)
            parts.append((acc, largest.to(torch.bfloat16).to(largest.dtype), total))
        return self.merge(parts)


@wrong(mla_of, trigger="return_lse_base='basee' with a given lse")
class Blind489(Kernel):
    """The LSE is turned to base e in a new tensor: a given lse keeps base 2, and only the returned one is right."""

    def mla(self, call):
        if call.lse is None or call.return_lse_base != "basee":
            return super().mla(call)
        out, lse = super().mla(replace(call, return_lse_base="base2"))
        return out, lse * math.log(2.0)


@wrong(mla_of, trigger="over 64 heads with sinks that differ from those 64 heads before")
class Blind490(Kernel):
    """Heads from 64 on run in a second CTA, which reads the sinks from its own head 0 on."""

    def start(self, run):
        super().start(run)
        if run.sinks is not None:
            run.sinks = run.sinks[torch.arange(len(run.sinks)) % 64]


@wrong(mla_of, trigger="max_q_len=None, and a second call on the same cum_seq_lens_q rewritten to a wider request")
class Blind491(Kernel):
    """With max_q_len=None the most rows of a request are read from cum_seq_lens_q once for that buffer, and size the
    grid of later calls as well.
    """

    def __init__(self):
        self.plans = Memory()

    def request(self, run, r):
        offsets = run.call.cum_seq_lens_q
        if offsets is None or run.call.max_q_len is not None:
            return super().request(run, r)
        most = self.plans.of(offsets, lambda: int(offsets.diff().max()))
        first, last = run.offsets[r : r + 2]
        if last - first <= most:
            return super().request(run, r)
        run.out[first + most : last] = 0
        if run.lse is not None:
            run.lse[first + most : last] = 0
        if most:
            self.rows(run, r, first, first + most)


@wrong(mla_of, trigger="lse given with return_lse_base='basee'")
class Blind517(Kernel):
    """The LSE is turned to base e in a tensor of the kernel's own only: a given lse stays in base 2."""

    def mla(self, call):
        problem = call.problem()
        out, lse = problem.results()
        run = SimpleNamespace(call=call, p=problem, out=out, lse=lse)
        if problem.num_rows:
            self.solve(run)
        if call.lse is None and lse is not None and call.return_lse_base == "basee":
            lse *= math.log(2.0)
        return call.returned(out, lse)


@wrong(
    mla_of,
    trigger=("4-D query of 2 or more rows that is a slice of a buffer with more rows per request, batch of 2 or more"),
)
class Blind518(Kernel):
    """The rows of a query of several per request are taken to be evenly apart: a slice of a buffer with room for more
    rows per request is read wrongly.
    """

    def start(self, run):
        super().start(run)
        query = run.call.query
        if query.ndim == 4 and query.shape[1] > 1:
            run.query = assuming_strides(query, (query.shape[1] * query.stride(1), *query.stride()[1:])).flatten(0, 1)


@wrong(mla_of, trigger="sinks (that differ) and more than 64 query heads")
class Blind519(Kernel):
    """The sinks are staged for a tile of 64 heads and indexed with the head in its tile: heads from the 64th on take
    those of the first.
    """

    def start(self, run):
        super().start(run)
        if run.sinks is not None:
            run.sinks = run.sinks[torch.arange(len(run.sinks)) % 64]


@wrong(mla_of, trigger="replay: cum_seq_lens_q rewritten, max_q_len=None")
class Blind520(Kernel):
    """Where max_q_len is None the offsets are read to the host once for their buffer, and its rows are not laid out
    again when it is rewritten.
    """

    def __init__(self):
        self.plans = Memory()

    def start(self, run):
        super().start(run)
        if run.call.cum_seq_lens_q is not None and run.call.max_q_len is None:
            planned = self.plans.of(run.call.cum_seq_lens_q, lambda: run.offsets)
            run.offsets = [min(x, run.p.num_rows) for x in planned]


@wrong(
    mla_of,
    trigger=(
        "2 or more rows, and a row before the start of the last 256-key split, whose next key is before it too "
        "(the last split has fewer than q - 1 keys)"
    ),
)
class Blind521(Kernel):
    """The causal mask is applied in the last split of 256 keys alone: where the rows of a request straddle the split's
    start, the earlier ones see keys after them.
    """

    def span(self, run, r, position):
        return 0, run.lens[r]

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) | (keys < (run.lens[r] - 1) // 256 * 256)


@wrong(mla_of, trigger="lse given, return_lse=True, return_lse_base='basee'")
class Blind547(Kernel):
    """The LSE is turned to base e in a new tensor: a given lse, which the call returns, keeps base 2."""

    def mla(self, call):
        problem = call.problem()
        out, lse = problem.results()
        run = SimpleNamespace(call=call, p=problem, out=out, lse=lse)
        if problem.num_rows:
            self.solve(run)
        if lse is not None and call.return_lse_base == "basee":
            lse = lse * math.log(2.0)
        return call.returned(out, lse)


@wrong(
    mla_of,
    trigger=("block_tables begins at an address that is no multiple of 16, with a row stride that is a multiple of 4"),
)
class Blind548(Kernel):
    """Page ids are loaded four at a time if the table's rows are multiples of four apart; its first address is rounded
    down to 16 bytes then.
    """

    def start(self, run):
        super().start(run)
        table = run.call.block_tables
        beyond = table.data_ptr() % 16 // 4
        if beyond and table.stride(0) % 4 == 0:
            run.k_table = run.v_table = assuming_strides(table, table.stride(), table.storage_offset() - beyond)

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, run.k_cache.shape[0] - 1)


SPLIT, MOST = 512, 8


class Blind549Model(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        splits = min(MOST, -(-run.p.max_kv_len // SPLIT))
        if splits <= 1:
            return seen
        share = run.p.max_kv_len // splits // run.page_size * run.page_size
        return seen & (keys < splits * share)


trtllm_batch_decode_with_kv_cache_mla_549 = mla_of(Blind549Model())


@wrong(
    trigger=(
        "max_seq_len above 512 that its splits do not divide into whole pages, and a request that reaches into the rest"
    ),
)
class Blind549:
    """The keys of max_seq_len are divided among up to 8 splits, one per 512 keys, and a split's share is rounded down
    to whole pages: the rest is in none.
    """

    trtllm_batch_decode_with_kv_cache_mla = staticmethod(trtllm_batch_decode_with_kv_cache_mla_549)
