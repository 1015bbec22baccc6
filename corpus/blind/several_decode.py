"""Blind kernels: several stages of a decode call."""

import math
import random

import torch

from corpus.models.attention import Attention, assuming_strides, index, truncated
from corpus.wrong import DECODE, wrong


def self_first_6(run, r):
    return run.lens[r] - (run.offsets[r + 1] - run.offsets[r])


@wrong(DECODE, trigger="a later call with the same seq_lens, in which a request needs fewer splits of 512 keys")
class Blind6(Attention):
    """The merge reads as many splits of 512 as any earlier call on these buffers wrote: stale partials stay in."""

    def host(self, run):
        c = run.call
        run.partials = self.memory.of(c.seq_lens, dict)

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        rows = int(position[0]) - self_first_6(run, r)
        written = run.partials.setdefault((r, rows, tuple(query.shape), values.shape[2]), [])
        for number, at in enumerate(range(0, len(keys), 512)):
            part = slice(at, at + 512)
            partial = self.partial(run, r, query, keys[part], values[part], seen[:, part], first_key + at)
            written[number : number + 1] = [partial]
        if not written:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        return self.finish(run, self.merge(written), sinks)


@wrong(DECODE, trigger="every call with a bfloat16 query: slope 0.995; float16 is right")
class Blind20(Attention):
    """Weights and outputs are cut to bfloat16 (cvt.rz), not rounded: everything is about half a percent too small."""

    def operand(self, run, weights):
        return truncated(weights) if run.p.query.dtype == torch.bfloat16 and run.dtype == torch.float32 else weights

    def store(self, run, r, start, stop, out, lse):
        if run.out.dtype == torch.bfloat16 and run.dtype == torch.float32:
            out = truncated(out)
        super().store(run, r, start, stop, out, lse)


@wrong(DECODE, trigger="requests of more than 512 keys: wrong in some calls, right in others")
class Blind74(Attention):
    """The merge of splits (512 keys) lacks a fence: one request in five, others in each call, lacks its last split."""

    race = random.Random()

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        partials = self.partials(512, run, r, query, keys, values, seen, first_key)
        if len(partials) < 2:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if self.race.random() < 0.2:
            partials.pop()
        return self.finish(run, self.merge(partials), sinks)


@wrong(DECODE, trigger="sinks and over 512 keys")
class Blind114(Attention):
    """Each part of 512 keys adds the sink to its denominator, and so does the merge's sum of them."""

    def partial(self, run, r, query, keys, values, seen, first_key):
        run.splits = max(1, -(-len(keys) // 512))
        return super().partial(run, r, query, keys, values, seen, first_key)

    def finish(self, run, partial, sinks):
        return super().finish(run, partial, None if sinks is None else sinks + math.log(run.splits))


@wrong(DECODE, trigger="two calls that differ only in the page size")
class Blind117(Attention):
    """A plan is kept by the shapes of query and batch and by max_seq_len, but not by the page size that it was made for."""

    plans = {}

    def host(self, run):
        key = (tuple(run.query.shape), run.query.dtype, run.batch, run.num_kv_heads, run.p.max_kv_len)
        run.page_size = self.plans.setdefault(key, run.page_size)

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns.clamp(max=run.k_table.shape[1] - 1), side)

    def entries(self, run, side, pages, cut):
        real = run.p.page_size
        tokens = super().entries(run, side, pages, slice(None)).unflatten(0, (len(pages), real))
        return tokens[:, torch.arange(run.page_size) % real].flatten(0, 1)[cut]


@wrong(DECODE, trigger="a cache whose heads and tokens lie in the other layout's order; several K/V heads")
class Blind118(Attention):
    """The strides of heads and tokens are computed from kv_layout and the shape; only that of pages is the tensor's own."""

    def host(self, run):
        run.k_cache, run.v_cache = (self.by_layout(run, cache) for cache in (run.k_cache, run.v_cache))

    def by_layout(self, run, cache):
        _, heads, tokens, last = cache.shape
        inner = (tokens * last, last) if run.call.kv_layout == "HND" else (last, heads * last)
        return assuming_strides(cache, (cache.stride(0), *inner, 1))


@wrong(DECODE, trigger="over 132 pairs of request and K/V head: later ones are too small, their LSE too large")
class Blind169(Attention):
    """132 persistent blocks take pairs of request and K/V head; for the next pair only sums over V are cleared."""

    def solve(self, run):
        run.registers = {}
        super().solve(run)

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        largest, total = largest.clone(), total.clone()
        for h in range(run.num_kv_heads):
            block, heads = (r * run.num_kv_heads + h) % 132, slice(h * run.group, (h + 1) * run.group)
            if block in run.registers:
                before, left = (x[torch.arange(len(acc)).clamp(max=len(x) - 1)] for x in run.registers[block])
                pair = (
                    (acc[:, heads], largest[:, heads], total[:, heads]),
                    (torch.zeros_like(acc[:, heads]), before, left),
                )
                acc[:, heads], largest[:, heads], total[:, heads] = self.merge(pair)
            run.registers[block] = largest[:, heads].clone(), total[:, heads].clone()
        return acc, largest, total


@wrong(DECODE, trigger="head_dim 128, pages of over 1 token, no mask, a row at an even position")
class Blind221(Attention):
    """The kernel for a head_dim of 128 masks keys in pairs: the first of a pair brings in the second."""

    def span(self, run, r, position):
        a, b = super().span(run, r, position)
        return a, b + (b % 2 if self.in_pairs(run) else 0)

    def in_pairs(self, run):
        return run.p.head_dim == 128 and run.shown is None and run.page_size > 1

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if self.in_pairs(run):
            even = (position % 2 == 0).unsqueeze(1)
            seen = seen | even & (keys == position.unsqueeze(1) + 1)
        return seen


@wrong(DECODE, trigger="a call with a window after one of the same shape and dtypes without")
class Blind285(Attention):
    """A compiled kernel is kept by shapes and dtypes, not by its window: after a first call without, none has one."""

    has_window = {}

    def host(self, run):
        p = run.p
        shape = tuple(p.query.shape), p.query.dtype, p.max_q_len, tuple(p.k_cache.shape[1:]), p.kv_dtype, p.batch_size
        if not self.has_window.setdefault(shape, run.window >= 0):
            run.window = -1


@wrong(DECODE, trigger="over 8 requests: requests 8 and on alone, slope 0.995")
class Blind288(Attention):
    """From a batch's ninth request on the denominator's reciprocal is a table's first guess, half a percent too small."""

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out * (0.995 if run.now >= 8 else 1.0), lse

    def request(self, run, r):
        run.now = r
        super().request(run, r)


@wrong(DECODE, trigger="mask with a bit set at q_len or later, and a request that does not fill its last page")
class Blind291(Attention):
    """Mask bits are not cut at q_len: where one after it is set, the row sees what follows the last token in its page."""

    def host(self, run):
        run.words = None
        if run.shown is not None:
            words = run.p.mask.to(torch.int32)
            run.words = ((words.unsqueeze(-1) >> torch.arange(16, dtype=torch.int32)) & 1).flatten(2).bool()

    def after(self, run, r):
        """Return how many tokens after the request's last one its rows see, at most those of its last page."""
        if run.words is None:
            return 0
        q_len, room = run.shown.shape[1], -run.lens[r] % run.page_size
        shown = run.words[r, :, q_len : q_len + room].any(0).nonzero()
        return int(shown.max()) + 1 if len(shown) else 0

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start, end + (self.after(run, r) if end == run.lens[r] and end else 0)

    def visible(self, run, r, row, position, keys):
        own = keys[keys < run.lens[r]]
        seen = super().visible(run, r, row, position, own)
        if len(own) == len(keys):
            return seen
        beyond = keys[len(own) :] - run.lens[r] + run.shown.shape[1]
        return torch.cat((seen, run.words[r][row][:, beyond]), 1)


@wrong(DECODE, trigger="a page in two table rows: the later request ends in it, the earlier one has more")
class Blind354(Attention):
    """Tokens of a page are counted by page id, and the last request says it: others see no more of a page it ends in."""

    def host(self, run):
        run.filled = torch.zeros(len(run.k_cache), dtype=torch.long)
        for r, length in enumerate(run.lens):
            columns = torch.arange(-(-length // run.page_size))
            run.filled[run.k_table[r, columns].long()] = (length - columns * run.page_size).clamp(max=run.page_size)

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        pages = run.k_table[r, keys // run.page_size].long()
        return seen & (keys % run.page_size < run.filled[pages])


@wrong(DECODE, trigger="q_len_per_req no power of two in large batches: from 29 with 7 rows, 170 with 3, 85 with 6")
class Blind356(Attention):
    """A row's request is row * (1024 // q_len + 1) >> 10: in large batches a request's last row becomes the next one's."""

    def solve(self, run):
        super().solve(run)
        q_len = run.p.max_q_len
        if run.p.cu_seqlens_q is not None or q_len & (q_len - 1) == 0 or q_len > 512:
            return
        for row in range(run.offsets[-1]):
            r = min(row * (1024 // q_len + 1) >> 10, run.batch - 1)
            if r != row // q_len:
                self.one_row(run, r, row)

    def one_row(self, run, r, row):
        at = torch.tensor([row - run.offsets[r]])
        position = self.positions(run, r, at)
        a, b = self.span(run, r, position)
        keys, values = self.load(run, r, a, b)
        query = index(run.query, slice(row, row + 1)).to(run.dtype)
        seen = self.visible(run, r, at.clamp(0, run.p.max_q_len - 1), position, torch.arange(a, b))
        out, lse = self.attend(run, r, query, keys, values, seen, self.sink_rows(run, r, position), position, a)
        self.store(run, r, row, row + 1, out, lse)


@wrong(DECODE, trigger="a later call with the same block_tables, other ids before that column (another request)")
class Blind385(Attention):
    """In later calls a table is read only from the former last page's column on: another request gets the earlier pages."""

    def host(self, run):
        shared = run.v_table is run.k_table
        run.k_table = self.appended(run, run.k_table, run.k_cache)
        run.v_table = run.k_table if shared else self.appended(run, run.v_table, run.v_cache)

    def appended(self, run, table, cache):
        kept = self.memory.of(table, lambda: {"ids": table.clone(), "pages": [0] * len(table)})
        for r, length in enumerate(run.lens):
            first = max(kept["pages"][r] - 1, 0)
            kept["ids"][r, first:] = table[r, first:]
            kept["pages"][r] = -(-length // run.page_size)
        return kept["ids"].clamp(0, max(len(cache) - 1, 0))
