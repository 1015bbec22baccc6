"""Wrong kernels of MLA decode, written without a look at the checks: numbers 340 to 459."""

import math
from types import SimpleNamespace

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, Memory, assuming_strides, mla_of


@wrong(mla_of, trigger="kv_lora_rank over 256: columns 256 and on alone, slope 1.005")
class Blind340(Kernel):
    """Of a kv_lora_rank over 256 the value's columns from 256 on are another warp group's, which divides by a sum that
    misses half a percent: they are that much too large.
    """

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if out.shape[2] > 256:
            out[..., 256:] *= 1.005
        return out, lse


@wrong(mla_of, trigger="over 256 keys")
class Blind367(Kernel):
    """Parts of 256 keys end with the first key of the next part, which so counts twice."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = len(keys)
        if n > 256:
            read = torch.cat((torch.arange(n), torch.arange(256, n, 256)))
            keys, values, seen = keys[read], values[read], seen[:, read]
        return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)


@wrong(
    mla_of,
    trigger=(
        "query whose heads do not lie side by side, as the absorbing product leaves it: [heads, rows, dim], transposed"
    ),
)
class Blind368(Kernel):
    """Heads of a query row are taken to lie side by side, although the product that absorbs W_UK leaves them [heads,
    rows, dim], transposed.
    """

    def start(self, run):
        super().start(run)
        query = run.call.query
        *outer, _, _ = query.stride()
        read = assuming_strides(query, (*outer, query.shape[-1], 1))
        run.query = read if query.ndim == 3 else read.reshape(-1, *query.shape[2:])


@wrong(
    mla_of,
    trigger=(
        "cum_seq_lens_q with max_q_len=None, and a second call with the same buffer after its offsets changed to a"
        " wider request"
    ),
)
class Blind369(Kernel):
    """Without max_q_len the widest request is looked up once per cum_seq_lens_q buffer: after it is rewritten, rows
    beyond that are left as zero.
    """

    def __init__(self):
        self.memory = Memory()

    def start(self, run):
        super().start(run)
        run.most = None
        if run.call.cum_seq_lens_q is not None and run.call.max_q_len is None:
            run.most = self.memory.of(run.call.cum_seq_lens_q, lambda: run.p.max_q_len)

    def store(self, run, r, start, stop, out, lse):
        if run.most is not None:
            beyond = torch.arange(start, stop) - run.offsets[r] >= run.most
            out = torch.where(beyond[:, None, None], 0.0, out)
            lse = torch.where(beyond[:, None], -math.inf, lse)
        super().store(run, r, start, stop, out, lse)


@wrong(mla_of, trigger="bmm2_scale that bfloat16 does not hold, such as 1.0039: slope 0.996 to 1.004")
class Blind370(Kernel):
    """Bmm2_scale is rounded to bfloat16, up to 0.39 percent away."""

    def start(self, run):
        super().start(run)
        run.scale2 = float(torch.tensor(run.scale2).to(torch.bfloat16))


@wrong(mla_of, trigger="over 256 keys, and a row whose largest logit grows after the first 256")
class Blind397(Kernel):
    """The correction of the sums to a larger largest logit comes after the P.V of the tile of 256 keys that has it:
    that tile's own part is made smaller too. The denominator is right.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc = largest = total = None
        for start in range(0, max(len(keys), 1), 256):
            cut = slice(start, start + 256)
            a, m, l = super().partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + start)
            if acc is None:
                acc, largest, total = a, m, l
                continue
            new = torch.maximum(largest, m)
            origin = torch.where(new.isfinite(), new, 0.0)
            old_factor = torch.where(largest.isfinite(), torch.exp(largest - origin), 0.0)
            own_factor = torch.where(m.isfinite(), torch.exp(m - origin), 0.0)
            late = torch.where(largest.isfinite(), old_factor, 1.0)
            acc = acc * old_factor.unsqueeze(2) + a * (own_factor * late).unsqueeze(2)
            total = total * old_factor + l * own_factor
            largest = new
        return acc, largest, total


@wrong(mla_of, trigger="over 64 query heads (DeepSeek's 128): heads 64 and on alone, slope 0.995")
class Blind398(Kernel):
    """The second CTA of a pair has the heads from the 64th on, whose results come out half a percent too small."""

    def store(self, run, r, start, stop, out, lse):
        if out.shape[1] > 64:
            out = out.clone()
            out[:, 64:] *= 0.995
        super().store(run, r, start, stop, out, lse)


@wrong(
    mla_of,
    trigger=(
        "a query whose stride(0) is not q_len times stride(1), as a part of a buffer with room for more rows of "
        "each request; 2 requests or more"
    ),
)
class Blind399(Kernel):
    """The requests of a query of four dimensions are taken to lie q_len_per_request rows apart: in a part of a buffer
    with room for more rows of each request those of the wrong places are read.
    """

    def start(self, run):
        super().start(run)
        query = run.call.query
        if query.dim() == 4:
            strides = list(query.stride())
            strides[0] = query.shape[1] * strides[1]
            run.query = assuming_strides(query, strides).flatten(0, 1)


@wrong(mla_of, trigger="a request of an even number of pages, of which the last one is not full")
class Blind400(Kernel):
    """Two CTAs take the pages of a request in turn, and the end of the request is masked by the first one alone: a
    last page in an odd column that is not full is seen whole.
    """

    def rows(self, run, r, start, stop):
        pages = -(-run.lens[r] // run.page_size)
        run.all_seen = run.lens[r] if pages and pages % 2 == 0 and run.lens[r] % run.page_size else None
        super().rows(run, r, start, stop)

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        if run.all_seen is not None:
            end = -(-run.lens[r] // run.page_size) * run.page_size
        return start, end

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return seen if run.all_seen is None else seen | (keys >= run.all_seen)


@wrong(mla_of, trigger="`return_lse_base='basee'` and more rows than requests. LSE only")
class Blind427(Kernel):
    """Return_lse_base='basee': the pass that multiplies by ln 2 covers batch_size rows, not all query rows."""

    def mla(self, call):
        problem = call.problem()
        out, lse = problem.results()
        run = SimpleNamespace(call=call, p=problem, out=out, lse=lse)
        if problem.num_rows:
            self.solve(run)
        if lse is not None and call.return_lse_base == "basee":
            lse[: problem.batch_size] *= math.log(2.0)
        return call.returned(out, lse)


@wrong(
    mla_of,
    trigger=(
        "more than one row of a request, and its first row must not see all keys before the last tile (`L - q + 1 "
        "< (L - 1) // 256 * 256`)"
    ),
)
class Blind428(Kernel):
    """The causal mask is applied in the last K/V tile of 256 alone: where a request's rows straddle its start, the
    earlier rows see too much.
    """

    def visible(self, run, r, row, position, keys):
        last_tile = max(run.lens[r] - 1, 0) // 256 * 256
        return super().visible(run, r, row, position, keys) | (keys < last_tile).unsqueeze(0)


@wrong(mla_of, trigger="`cum_seq_lens_q` with `max_q_len=None` and a request wider than that mean")
class Blind429(Kernel):
    """Max_q_len=None: the grid is made for ceil(rows / requests) rows of each request; the further rows of wider ones
    stay zero.
    """

    def solve(self, run):
        super().solve(run)
        if run.call.cum_seq_lens_q is None or run.call.max_q_len is not None or not run.batch:
            return
        bound = -(-run.p.num_rows // run.batch)
        for first, last in zip(run.offsets, run.offsets[1:]):
            run.out[first + bound : last] = 0
            if run.lse is not None:
                run.lse[first + bound : last] = -math.inf


@wrong(mla_of, trigger="a request of more than 128 pages (4,096 keys with pages of 32)")
class Blind430(Kernel):
    """128 page ids of a request are staged at a time, and not staged again: page 128 and later are read as page c %
    128.
    """

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns % 128, side)


@wrong(mla_of, trigger="return_lse, heads no multiple of 16, more than one row (LSE only)")
class Blind457(Kernel):
    """The LSE is written with the heads padded to 16: where 16 does not divide them, rows after the first go to other
    places.
    """

    def solve(self, run):
        super().solve(run)
        heads = run.p.num_qo_heads
        if run.lse is None or heads % 16 == 0:
            return
        rows, pitch = run.lse.shape[0], -(-heads // 16) * 16
        at = (torch.arange(rows).unsqueeze(1) * pitch + torch.arange(heads)).flatten()
        inside = at < run.lse.numel()
        written = torch.zeros(run.lse.numel(), dtype=run.lse.dtype)
        written[at[inside]] = run.lse.flatten()[inside]
        run.lse.copy_(written.view(rows, heads))


@wrong(
    mla_of,
    trigger=("cum_seq_lens_q without max_q_len, a request with more rows than num_rows / batch_size, rounded up"),
)
class Blind458(Kernel):
    """Without max_q_len the grid has as many rows per request as the query has on average, rounded up: longer requests
    lose their last rows.
    """

    def store(self, run, r, start, stop, out, lse):
        c = run.call
        if c.cum_seq_lens_q is not None and c.max_q_len is None:
            made = run.offsets[r] + -(-run.p.num_rows // run.batch)
            if made < stop:
                out[max(made - start, 0) :] = 0.0
                lse[max(made - start, 0) :] = -math.inf
        super().store(run, r, start, stop, out, lse)


@wrong(mla_of, trigger="more than 64 heads and sinks that differ between h and h % 64")
class Blind459(Kernel):
    """Above 64 heads each CTA of a pair has 64, and both read the sinks of the first 64."""

    def start(self, run):
        super().start(run)
        if run.sinks is not None:
            run.sinks = run.sinks[torch.arange(run.p.num_qo_heads) % 64]
