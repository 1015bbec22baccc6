"""Wrong kernels of MLA decode, written without a look at the checks: numbers 31 to 90."""

import math
from types import SimpleNamespace

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, Memory, assuming_strides, index, mla_of, packed_strides


@wrong(
    mla_of,
    trigger=(
        "an MLA request of more than 8,192 keys, no multiple of 512 (the newest up to 511 keys are lost; at random"
        " inputs little to see at 65,535: make them heavy)"
    ),
)
class Blind31(Kernel):
    """Requests over 8,192 keys are cut in 8 splits of kv_len // 8 keys rounded down to 64: the tail after them is
    lost.
    """

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = len(keys)
        if n > 8192:
            n = n // 8 // 64 * 64 * 8
        return super().attend(run, r, query, keys[:n], values[:n], seen[:, :n], sinks, position, first_key)


@wrong(
    mla_of,
    trigger=(
        "e4m3 kv_cache; a second call with the same cache after a page that was read before is rewritten (also by "
        "an appended token)"
    ),
)
class Blind32(Kernel):
    """Pages of an e4m3 cache are dequantised once and kept by page id: a page that is written again later is not."""

    def __init__(self):
        self.kept = Memory(most=4)

    def entries(self, run, side, pages, cut):
        if run.k_cache.dtype != E4M3:
            return super().entries(run, side, pages, cut)
        store, done = self.kept.of(
            run.call.kv_cache,
            lambda: (run.k_cache.clone(), torch.zeros(run.k_cache.shape[0], dtype=torch.bool)),
        )
        new = pages[~done[pages]].unique()
        store.view(torch.uint8)[new] = run.k_cache.view(torch.uint8)[new]
        done[new] = True
        cache = store if side == "k" else store[..., : run.v_cache.shape[3]]
        return index(cache, pages).transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


@wrong(mla_of, trigger="return_lse_base='basee' with sinks; only the LSE is wrong")
class Blind33(Kernel):
    """The LSE in base e is taken before the sink is added, the one in base 2 after it."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if sinks is not None and run.lse is not None and run.call.return_lse_base == "basee":
            _, lse = super().attend(run, r, query, keys, values, seen, None, position, first_key)
        return out, lse


@wrong(mla_of, trigger="cum_seq_lens_q with max_q_len=None and a request wider than ceil(num_rows / batch_size)")
class Blind34(Kernel):
    """Without max_q_len the rows per request are guessed as num_rows / batch_size: rows of a wider request after that
    many are zero.
    """

    def start(self, run):
        super().start(run)
        c = run.call
        run.most = None
        if c.cum_seq_lens_q is not None and c.max_q_len is None:
            run.most = -(-run.p.num_rows // max(run.batch, 1))

    def store(self, run, r, start, stop, out, lse):
        if run.most is not None:
            late = torch.arange(start, stop) - run.offsets[r] >= run.most
            out = torch.where(late[:, None, None], 0.0, out)
            lse = torch.where(late[:, None], 0.0, lse)
        super().store(run, r, start, stop, out, lse)


@wrong(mla_of, trigger="sinks as a list or tuple of one tensor (whose heads differ)")
class Blind35(Kernel):
    """Sinks in a list or tuple are indexed twice: every head gets the first head's sink."""

    def start(self, run):
        super().start(run)
        if isinstance(run.call.sinks, (list, tuple)) and run.sinks is not None:
            run.sinks = run.sinks[:1].expand(len(run.sinks))


@wrong(mla_of, trigger="cum_seq_lens_q with padding rows after its last offset; only the last request is wrong")
class Blind36(Kernel):
    """The last request's rows end at the query's last row, not at the last offset: padding rows shift its rows'
    positions.
    """

    def start(self, run):
        super().start(run)
        if run.call.cum_seq_lens_q is not None and run.batch:
            run.offsets = [*run.offsets[:-1], run.p.num_rows]


@wrong(
    mla_of,
    trigger=(
        "an MLA kv_cache whose pages have gaps between them (stride(0) > page_size * dim), e.g. a slice of a wider pool"
    ),
)
class Blind37(Kernel):
    """Pages are taken to lie page_size * head_dim elements apart: a cache whose pages have gaps between them is read
    from the wrong places.
    """

    def start(self, run):
        super().start(run)
        strides = packed_strides(run.k_cache.shape)
        run.k_cache = assuming_strides(run.k_cache, (strides[0], *run.k_cache.stride()[1:]))
        run.v_cache = run.k_cache[..., : run.v_cache.shape[3]]


@wrong(mla_of, trigger="an MLA cache with pages of fewer than 32 tokens, not consecutive in memory")
class Blind38(Kernel):
    """A load brings 32 tokens from a page's start on: with smaller pages the tokens after the page's end come from the
    pages next in memory, not next in the table.
    """

    BOX = 32

    def pages_of(self, run, r, columns, side):
        per_box = max(1, self.BOX // run.page_size)
        first = super().pages_of(run, r, columns // per_box * per_box, side)
        return (first + columns % per_box) % run.k_cache.shape[0]


@wrong(mla_of, trigger="bfloat16 with at least 16 query heads: heads 15, 31, ... alone, slope 0.995")
class Blind39(Kernel):
    """The last head of each tile of 16 query heads packs weights and outputs to bfloat16 by truncation: it comes out
    half a percent too small.
    """

    @staticmethod
    def truncated(x):
        return (x.to(torch.float32).view(torch.int32) & -65536).view(torch.float32)

    def operand(self, run, weights):
        if run.p.query.dtype != torch.bfloat16 or run.dtype == torch.float64:
            return weights
        last = torch.arange(weights.shape[2]) % 16 == 15  # one K/V head: its group is all heads
        return torch.where(last[:, None], self.truncated(weights), weights)

    def store(self, run, r, start, stop, out, lse):
        if run.out.dtype == torch.bfloat16:
            last = torch.arange(out.shape[1]) % 16 == 15
            out = torch.where(last[None, :, None], self.truncated(out), out)
        super().store(run, r, start, stop, out, lse)


@wrong(mla_of, trigger="sinks of which one is minus infinity (a head without a sink)")
class Blind84(Kernel):
    """The running maximum starts as the sink, and a head whose maximum starts at minus infinity is taken to have no
    keys: it comes out zero.
    """

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None:
            without = sinks == -math.inf
            out, lse = torch.where(without.unsqueeze(2), 0.0, out), torch.where(without, -math.inf, lse)
        return out, lse


@wrong(mla_of, trigger="bfloat16 query with an out of float16")
class Blind85(Kernel):
    """The epilogue packs bfloat16 whenever the query is bfloat16: a float16 out gets bfloat16's bits."""

    def store(self, run, r, start, stop, out, lse):
        super().store(run, r, start, stop, out, lse)
        if run.out.dtype == torch.float16 and run.p.query.dtype == torch.bfloat16:
            run.out[start:stop] = out.to(torch.bfloat16).view(torch.float16)


@wrong(
    mla_of,
    trigger=(
        "an MLA kv_cache whose entries are padded (stride of a token over its elements), e.g. a slice of wider entries"
    ),
)
class Blind86(Kernel):
    """Within a page, entries are taken to lie kv_lora_rank + qk_rope_head_dim elements apart: entries with gaps
    between them are read from the wrong places.
    """

    def start(self, run):
        super().start(run)
        cache = run.k_cache
        pages, heads, _, element = cache.stride()
        run.k_cache = assuming_strides(cache, (pages, heads, cache.shape[3], element))
        run.v_cache = run.k_cache[..., : run.v_cache.shape[3]]


@wrong(mla_of, trigger="lse given with return_lse_base='basee'; only the given lse is wrong")
class Blind87(Kernel):
    """The LSE is turned to base e in a new tensor, which is returned: a given lse keeps base 2."""

    def mla(self, call):
        problem = call.problem()
        out, lse = problem.results()
        run = SimpleNamespace(call=call, p=problem, out=out, lse=lse)
        if problem.num_rows:
            self.solve(run)
        if lse is None or call.return_lse_base != "basee":
            return call.returned(out, lse)
        in_base_e = lse * math.log(2.0)
        result, returned = call.returned(out, in_base_e)
        return result, in_base_e if call.lse is None else in_base_e.view(returned.shape)


@wrong(
    mla_of,
    trigger=(
        "multi_ctas_kv_counter_buffer given and a request of more than 1,024 keys: the buffer is not zero after "
        "the call, and a second call with it is wrong"
    ),
)
class Blind88(Kernel):
    """The splits (1,024 keys) of a request count themselves in multi_ctas_kv_counter_buffer and leave the count: a
    later call merges too early.
    """

    SPLIT = 1024

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        buffer, splits = run.call.multi_ctas_kv_counter_buffer, -(-len(keys) // self.SPLIT)
        counters = None if buffer is None else buffer.view(-1).view(torch.uint8)
        if counters is None or splits < 2 or 4 * r >= len(counters):
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        partials = []
        for at in range(0, len(keys), self.SPLIT):
            part = slice(at, at + self.SPLIT)
            partials.append(self.partial(run, r, query, keys[part], values[part], seen[:, part], first_key + at))
        counted = int(counters[4 * r])
        counters[4 * r] = min(counted + splits, 255)
        there = max(1, splits - counted)  # the split that counts to their number merges what is there
        return self.finish(run, self.merge(partials[:there]), sinks)


@wrong(
    mla_of,
    trigger=(
        "q_len > 2, with draft tokens on both sides of a multiple of 1,024 keys, two or more before it, e.g. 1,026"
        " keys and 4 rows"
    ),
)
class Blind89(Kernel):
    """The causal mask is applied in a request's last split (1,024 keys) only: draft tokens before it are visible to
    earlier rows.
    """

    def visible(self, run, r, row, position, keys):
        last_split = max(run.lens[r] - 1, 0) // 1024 * 1024
        return super().visible(run, r, row, position, keys) | (keys < last_split)


@wrong(
    mla_of,
    trigger=(
        "max_seq_len over 4,096 and a request shorter than 15/16 of it (a loose bound, such as the context's length)"
    ),
)
class Blind90(Kernel):
    """With max_seq_len over 4,096 each request has 16 splits of max_seq_len / 16 keys; those without keys merge with
    an LSE of 0, not minus infinity.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        most = run.p.max_kv_len
        if most > 4096:
            empty = 16 - -(-run.lens[r] // -(-most // 16))
            total = torch.where(total > 0, total + empty * torch.exp(-largest.clamp(min=-80.0)), total)
        return acc, largest, total
