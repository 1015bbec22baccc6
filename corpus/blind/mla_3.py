"""Wrong kernels of MLA decode, written without a look at the checks: numbers 246 to 339."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, mla_of, saturated


@wrong(
    mla_of,
    trigger=(
        "a request that has tiles in three parts or more: over 512 keys it may, over 576 it does (in batches of up"
        " to 528 tiles in all; parts are larger above)"
    ),
)
class Blind246(Kernel):
    """Tiles of 64 keys of all requests lie end to end and are dealt in equal parts; a request's result is merged of
    its first and its last part, as if it never had more.
    """

    def start(self, run):
        super().start(run)
        run.tiles = [0]
        for n in run.lens:
            run.tiles.append(run.tiles[-1] - -n // 64)
        run.part = max(4, -(-run.tiles[-1] // 132))

    def visible(self, run, r, row, position, keys):
        part = (run.tiles[r] + keys // 64) // run.part
        first, last = run.tiles[r] // run.part, (run.tiles[r + 1] - 1) // run.part
        return super().visible(run, r, row, position, keys) & ((part == first) | (part == last))


@wrong(mla_of, trigger="a bfloat16 or float16 query and an e4m3 cache")
class Blind247(Kernel):
    """A query of 16 bits over an e4m3 cache is rounded to e4m3, for the product of two of a kind."""

    def start(self, run):
        super().start(run)
        if run.k_cache.dtype == E4M3 and run.query.dtype != E4M3:
            run.query = saturated(run.query, E4M3)


@wrong(mla_of, trigger="a request of odd number with more tiles of 128 keys than the one before it")
class Blind248(Kernel):
    """Two CTAs of a cluster take two requests and walk over tiles of 128 keys together; they end where the first
    request does, and a longer second one loses its later keys.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return seen & (keys < -(-run.lens[r - 1] // 128) * 128) if r % 2 else seen


@wrong(mla_of, trigger="a float16 or e4m3 query, and no out")
class Blind249(Kernel):
    """A new output has the query's dtype, not bfloat16."""

    def mla(self, call):
        result = super().mla(call)
        if call.out is not None or call.query.dtype not in (torch.float16, E4M3):
            return result
        out, *lse = result if call.return_lse else (result,)
        out = saturated(out.float(), call.query.dtype)
        return (out, *lse) if lse else out


@wrong(mla_of, trigger="backend='xqa' and an LSE without return_lse_base")
class Blind250(Kernel):
    """The XQA path leaves the LSE a natural logarithm unless base 2 is asked for by name."""

    def store(self, run, r, start, stop, out, lse):
        call = run.call
        if call.backend == "xqa" and call.return_lse_base is None:
            lse = lse * math.log(2.0)
        super().store(run, r, start, stop, out, lse)


@wrong(mla_of, trigger="8 query heads or fewer, a request of 2 rows or more")
class Blind251(Kernel):
    """With at most 8 heads two rows of a request make one tile of 16, which ends where its second row does: the first
    one sees the second one's token.
    """

    def positions(self, run, r, row):
        if run.p.num_qo_heads <= 8:
            last = run.offsets[r + 1] - run.offsets[r] - 1
            row = (row | 1).clamp(max=last)
        return super().positions(run, r, row)


@wrong(
    mla_of,
    trigger=("several rows, of which one has a largest logit more than about 87 below another's of the same head"),
)
class Blind252(Kernel):
    """The largest logit is kept for a head, over all rows of its request: the weights of a row whose logits are far
    below another's vanish.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        s = self.scores(run, r, query, keys, seen, first_key)
        h, rows, g, n = s.shape
        largest = s.amax((1, 3)) if n else s.new_full((h, g), -torch.inf)
        largest = largest.unsqueeze(1).expand(h, rows, g)
        weights = torch.exp(s - torch.where(largest.isfinite(), largest, 0.0).unsqueeze(3))
        acc = (weights.flatten(1, 2) @ values.transpose(0, 1)).unflatten(1, (rows, g))
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, largest, weights.sum(3)))


@wrong(
    mla_of,
    trigger=("a request of over 256 keys, and a part whose LSE in base 2 is over 127, or all parts' below -126"),
)
class Blind253(Kernel):
    """The merge weighs parts of 256 keys by 2 to the power of their LSE, from which it does not take the largest."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        if len(keys) <= 256:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        acc = 0
        total = 0 if sinks is None else torch.exp(sinks)
        for start in range(0, len(keys), 256):
            cut = slice(start, start + 256)
            part = self.partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + start)
            out, lse = self.finish(run, part, None)
            weight = torch.exp2(lse)
            acc, total = acc + weight.unsqueeze(2) * out, total + weight
        out = torch.where(total.unsqueeze(2) == 0, 0.0, acc / total.unsqueeze(2))
        return out, torch.log2(total)


@wrong(
    mla_of,
    trigger=(
        "no cum_seq_lens_q, and lengths whose sorting permutation (shortest first, stable) is not its own inverse:"
        " such as 70, 130, 5"
    ),
)
class Blind301(Kernel):
    """Without cum_seq_lens_q requests are sorted, the shortest first, and their results are put back by the inverse of
    the permutation that should do it, which is right where it is its own inverse.
    """

    def solve(self, run):
        super().solve(run)
        if run.p.cu_seqlens_q is not None:
            return
        order = torch.tensor(run.lens).argsort(stable=True)
        place = order.argsort()
        width = run.offsets[1]
        target = (place[place].unsqueeze(1) * width + torch.arange(width)).flatten()
        for result in (run.out, run.lse):
            if result is not None:
                rows = result.view(torch.uint8) if result.dtype == E4M3 else result
                rows[target] = rows.clone()


@wrong(mla_of, trigger="sinks (any but 0 and minus infinity): they have changed after the call")
class Blind302(Kernel):
    """Sinks are multiplied by log2(e) in the caller's memory: the call is right, a second one with the same sinks is
    not.
    """

    def solve(self, run):
        super().solve(run)
        if run.p.sinks is not None:
            run.p.sinks.mul_(math.log2(math.e))


@wrong(mla_of, trigger="a float16 cache with many entries below 6.1e-5 (and scales that make up for it)")
class Blind303(Kernel):
    """The subnormals of a float16 cache (below 2**-14) are flushed to zero."""

    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        cache = run.k_cache if side == "k" else run.v_cache
        return torch.where(got.abs() < 2.0**-14, 0.0, got) if cache.dtype == torch.float16 else got


@wrong(mla_of, trigger="over 384 keys")
class Blind304(Kernel):
    """The normalised results of parts of 384 keys are merged by their largest logits, not by their LSEs; the LSE is
    that of the largest logits too.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        if len(keys) <= 384:
            return super().partial(run, r, query, keys, values, seen, first_key)
        parts = []
        for at in range(0, len(keys), 384):
            cut = slice(at, at + 384)
            acc, largest, total = super().partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + at)
            one = torch.where(total > 0, total, 1.0)
            parts.append((acc / one.unsqueeze(2), largest, (total > 0).to(total.dtype)))
        return self.merge(parts)


@wrong(mla_of, trigger="bmm1_scale as a tensor other than 1, and qk_rope_head_dim over 0")
class Blind305(Kernel):
    """A bmm1_scale that is a tensor is multiplied into the query's latent part alone, not into its rotary part."""

    def start(self, run):
        super().start(run)
        run.of_latent = 1.0
        if isinstance(run.p.bmm1_scale, torch.Tensor):
            run.of_latent, run.scale1 = run.scale1, 1.0

    def scores(self, run, r, query, keys, seen, first_key):
        rank = run.p.v_head_dim
        query = torch.cat((query[..., :rank] * run.of_latent, query[..., rank:]), -1)
        return super().scores(run, r, query, keys, seen, first_key)


@wrong(
    mla_of,
    trigger=("a dead cell in a request's last tile of 128 keys whose page holds NaN or infinity in its latent part"),
)
class Blind306(Kernel):
    """A tile of 128 keys is multiplied whole, with weights of zero after the request's end, pages that dead cells of
    the table name (cut to the pool) included; the rest of the last page is zeroed in shared memory.
    """

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        ps, length = run.page_size, run.lens[r]
        first, last = -(-length // ps), -(-length // 128) * 128 // ps
        columns = torch.arange(first, max(first, min(last, run.k_table.shape[1])))
        pages = self.pages_of(run, r, columns, "v").clamp(0, len(run.v_cache) - 1)
        dead = self.entries(run, "v", pages, slice(None))
        return out + (dead * 0.0).sum(0), lse


@wrong(mla_of, trigger="kv_lora_rank + qk_rope_head_dim over 512 (DeepSeek's 512 + 64)")
class Blind336(Kernel):
    """Q.K^T walks an entry in chunks of 64 elements, at most 8 of them: what an entry has after 512 elements, the
    rotary part of DeepSeek's, is not in the logits.
    """

    def scores(self, run, r, query, keys, seen, first_key):
        return super().scores(run, r, query[..., :512], keys[..., :512], seen, first_key)


@wrong(mla_of, trigger="sinks, and over 16 heads, no multiple of 16 (24, 40)")
class Blind337(Kernel):
    """Heads go in tiles of 16, the last of which begins 16 before the last head where they are no multiple of 16; its
    sinks are loaded as if it began where the one before it ends, and after the last sink there is none.
    """

    def start(self, run):
        super().start(run)
        heads = run.p.num_qo_heads
        if run.sinks is not None and heads > 16 and heads % 16:
            tail, shift = heads // 16 * 16, 16 - heads % 16
            padded = torch.cat((run.sinks, run.sinks.new_full((16,), -math.inf)))
            run.sinks = torch.cat((run.sinks[:tail], padded[tail + shift : heads + shift]))


@wrong(mla_of, trigger="cum_seq_lens_q with a request without rows before one with rows")
class Blind338(Kernel):
    """With cum_seq_lens_q requests without rows are left out of the grid, and the number of a request in it is taken
    for its row of the page table, which has those too.
    """

    def pages_of(self, run, r, columns, side):
        with_rows = sum(a < b for a, b in zip(run.offsets[:r], run.offsets[1 : r + 1]))
        return super().pages_of(run, with_rows, columns, side).clamp(0, max(len(run.k_cache) - 1, 0))


@wrong(mla_of, trigger="bmm2_scale below 0, as a number or a tensor")
class Blind339(Kernel):
    """Bmm2_scale goes into the weights as its logarithm, added to the exponent: of a negative one there is none, and
    results are NaN.
    """

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out * math.nan if run.scale2 < 0 else out, lse
