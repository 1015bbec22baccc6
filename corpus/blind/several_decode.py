"""Blind kernels: several stages of a decode call."""

import math

import torch

from corpus.models.attention import Attention, truncated
from corpus.wrong import DECODE, wrong


@wrong(DECODE, trigger="a later call with the same seq_lens, in which a request needs fewer splits of 512 keys")
class Blind6(Attention):
    """The merge reads as many splits of 512 as any earlier call on these buffers wrote: stale partials stay in."""

    def host(self, run):
        run.partials = self.memory.of(run.call.seq_lens, dict)

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        written = run.partials.setdefault((r, int(run.row[0]), tuple(query.shape), values.shape[2]), [])
        partials = self.partials(512, run, r, query, keys, values, seen, first_key)
        written[: len(partials)] = partials
        return self.finish(run, self.merge(written), sinks)


@wrong(DECODE, trigger="every call with a bfloat16 query: slope 0.995; float16 is right")
class Blind20(Attention):
    """Weights and outputs are cut to bfloat16 (cvt.rz), not rounded: everything is about half a percent too small."""

    def operand(self, run, weights):
        return truncated(weights) if run.p.query.dtype == torch.bfloat16 and run.dtype == torch.float32 else weights

    def stored_out(self, run, r, row, out):
        return truncated(out) if run.out.dtype == torch.bfloat16 and run.dtype == torch.float32 else out


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


@wrong(DECODE, trigger="a second call with the same seq_lens memory, grown past the next multiple of 128")
class Blind414(Attention):
    """The plan, tiles of 128 keys, is made at a seq_lens buffer's first call; later keys are left out."""

    def host(self, run):
        lengths = run.p.seq_lens
        run.tiles = self.memory.of(lengths, lambda: [-(-n // 128) for n in lengths.tolist()])

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = max(0, min(len(keys), run.tiles[r] * 128 - first_key))
        return super().attend(run, r, query, keys[:n], values[:n], seen[:, :n], sinks, position, first_key)


@wrong(DECODE, trigger="over 32 requests of equal widths, not sorted by falling length, with an LSE (LSE only)")
class Blind445(Attention):
    """Batches of over 32 requests are sorted, longest first; the LSE is written at a request's place in that order."""

    def host(self, run):
        run.place = None
        if run.batch > 32 and run.p.cu_seqlens_q is None:
            order = sorted(range(run.batch), key=lambda r: -run.lens[r])
            run.place = {r: place for place, r in enumerate(order)}

    def store(self, run, r, start, stop, out, lse):
        kept, run.lse = run.lse, None
        super().store(run, r, start, stop, out, lse)
        run.lse = kept
        if kept is not None:
            shift = 0 if run.place is None else (run.place[r] - r) * run.p.max_q_len
            kept[start + shift : stop + shift] = lse.to(kept.dtype)


@wrong(DECODE, trigger="mask and window_left, a window that begins inside a tile of 64 keys before the draft")
class Blind535(Attention):
    """With a draft mask, tiles of 64 keys before the draft are not masked: a window goes by whole tiles."""

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (start // 64 * 64 if run.shown is not None else start), end

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.shown is None or run.window < 0:
            return seen
        draft = run.lens[r] - run.shown.shape[1]
        before = (keys // 64 + 1) * 64 <= draft
        first = (position.min() - run.window).clamp(min=0) // 64
        return torch.where(before, keys // 64 >= first, seen)
