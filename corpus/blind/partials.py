"""Blind kernels: partial results of prompts, MLA and ragged calls."""

import math

import torch

from corpus.models.attention import E4M3, Attention, by_row
from corpus.wrong import CONTEXT, DECODE, MLA, RAGGED, wrong


class Partial(Attention, stage="partial"):
    def rarely_rescaled(self, s, values, size, largest_weight, is_renewed):
        """Return the partial result of tiles, whose origin is renewed by a tile's largest logit only if is_renewed is True."""
        origin, total = s.new_full(s.shape[:3], -math.inf), s.new_zeros(s.shape[:3])
        acc = s.new_zeros(*s.shape[:3], values.shape[2])
        for at in range(0, s.shape[3], size):
            tile = s[..., at : at + size]
            most = tile.amax(3)
            new = torch.where(is_renewed(most, origin), most, origin)
            safe = torch.where(new.isfinite(), new, 0.0)
            factor = torch.where(origin.isfinite(), torch.exp(origin - safe), 0.0)
            weights = torch.exp(tile - safe.unsqueeze(3))
            total = total * factor + weights.sum(3)
            held = weights.clamp(max=largest_weight).flatten(1, 2)
            sums = (held @ values[at : at + size].transpose(0, 1)).unflatten(1, s.shape[1:3])
            acc, origin = acc * factor.unsqueeze(3) + sums, new
        return by_row(acc, origin, total)

    @wrong(CONTEXT, trigger="a negative bmm1_scale, and logits of a row that spread over more than 88")
    def blind76(self, run, r, query, keys, values, seen, first_key):
        """The running maximum is of Q.K^T before the scale: a negative bmm1_scale makes it the smallest, and exp overflows."""
        if run.scale1 >= 0 or not len(keys):
            return super().partial(run, r, query, keys, values, seen, first_key)
        s = self.scores(run, r, query, keys, seen, first_key)
        smallest = torch.where(s == -math.inf, math.inf, s).amin(3)
        return self.relative_to(torch.where(smallest.isfinite(), smallest, -math.inf), s, values)

    @wrong(CONTEXT, trigger="float16 query, and weights times V that add up to over 65,504 before the division")
    def blind78(self, run, r, query, keys, values, seen, first_key):
        """With a float16 query the unnormalised P.V is kept in float16: sums beyond 65,504 become infinite."""
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        if run.p.query.dtype == torch.float16:
            acc = torch.where(acc.abs() > 65504, torch.sign(acc) * math.inf, acc)
        return acc, largest, total

    @wrong(CONTEXT, trigger="385 to 512, 769 to 896, ... keys")
    def blind130(self, run, r, query, keys, values, seen, first_key):
        """Tiles of 128 keys go through three stages; the last of 4, 7, 10, ... finds the V of the tile three before it."""
        tiles = -(-len(keys) // 128)
        if tiles > 3 and tiles % 3 == 1:
            last = (tiles - 1) * 128
            stale = values[last - 384 : last - 384 + len(values) - last]
            values = torch.cat((values[:last], stale))
        return super().partial(run, r, query, keys, values, seen, first_key)

    @wrong(CONTEXT, trigger="an e4m3 query, and a logit after the first 128 keys above all before it by 6.1 to 8.3")
    def blind185(self, run, r, query, keys, values, seen, first_key):
        """Sums are rescaled only where the largest logit grows by over 12 bits; e4m3 weights beyond 448 saturate."""
        if run.query.dtype != E4M3 or not len(keys):
            return super().partial(run, r, query, keys, values, seen, first_key)
        s = self.scores(run, r, query, keys, seen, first_key)
        return self.rarely_rescaled(s, values, 128, 448.0, lambda most, old: most > old + 12 * math.log(2.0))

    @wrong(CONTEXT, trigger="two rows of 16 of a request whose largest logits (of one head) differ by over 100")
    def blind240(self, run, r, query, keys, values, seen, first_key):
        """16 rows of a head share one largest logit, so that a row whose own is far below has weights of zero."""
        s = self.scores(run, r, query, keys, seen, first_key)
        h, rows, g, n = s.shape
        largest = s.amax(3) if n else s.new_full((h, rows, g), -math.inf)
        largest = torch.cat([x.amax(1, keepdim=True).expand_as(x) for x in largest.split(16, 1)], 1)
        return self.relative_to(largest, s, values)

    @wrong(CONTEXT, trigger="e4m3 query, over 128 keys, a largest logit that grows later by 0.8 to 8 (base 2)")
    def blind453(self, run, r, query, keys, values, seen, first_key):
        """e4m3 queries: the largest logit is renewed when it grows by 8 (base 2), and P * 256 saturates at 448 before."""
        if run.query.dtype != E4M3 or len(keys) <= 128:
            return super().partial(run, r, query, keys, values, seen, first_key)

        def is_renewed(most, old):
            return (most > -math.inf) & ((old == -math.inf) | ((most - old) / math.log(2.0) > 8.0))

        s = self.scores(run, r, query, keys, seen, first_key)
        return self.rarely_rescaled(s, values, 128, 448.0 / 256.0, is_renewed)

    @wrong(CONTEXT, trigger="head_dim over 128, over 64 keys, a row whose largest logit is in the last tile of 64")
    def blind483(self, run, r, query, keys, values, seen, first_key):
        """With head_dim over 128 the accumulator's second half is not rescaled at the last tile of 64 keys."""
        n, dim = values.shape[0], values.shape[2]
        if n <= 64 or dim <= 128:
            return super().partial(run, r, query, keys, values, seen, first_key)
        cut = (n - 1) // 64 * 64
        before, last = (
            self.partial_of(part, run, r, query, keys, values, seen, first_key)
            for part in (slice(0, cut), slice(cut, n))
        )
        acc, largest, total = self.merge([before, last])
        origin = torch.where(largest.isfinite(), largest, 0.0)
        factor = torch.where(last[1].isfinite(), torch.exp(last[1] - origin), 0.0).unsqueeze(2)
        acc[..., 128:] = before[0][..., 128:] + (last[0] * factor)[..., 128:]
        return acc, largest, total

    @wrong(CONTEXT, trigger="e4m3 query and cache, over 64 keys, a later maximum above by 0.56 to 5.5")
    def blind545(self, run, r, query, keys, values, seen, first_key):
        """With e4m3 operands weights times 256 keep an old maximum while it grows by under 2^8: they saturate at 448."""
        LAZY = 8 * 0.6931471805599453
        if run.query.dtype != E4M3:
            return super().partial(run, r, query, keys, values, seen, first_key)
        s = self.scores(run, r, query, keys, seen, first_key)
        return self.rarely_rescaled(s, values, 64, 448.0 / 256.0, lambda most, old: most > old + LAZY)

    @wrong(CONTEXT, trigger="over 128 keys, a running maximum that rises by over 8 (base 2) at a later block")
    def blind574(self, run, r, query, keys, values, seen, first_key):
        """Where a block of 128 keys raises the largest logit by over 8 (base 2), the sum of weights is not rescaled."""
        JUMP = 8 * math.log(2.0)
        state, *later = self.partials(128, run, r, query, keys, values, seen, first_key)
        for more in later:
            acc, largest, total = self.merge([state, more])
            jumped = state[1].isfinite() & (more[1] - state[1] > JUMP)
            state = acc, largest, torch.where(jumped, state[2] + more[2], total)
        return state

    @wrong(MLA, trigger="max_seq_len over 4,096 and a request shorter than 15/16 of it (a loose bound)")
    def blind90(self, run, r, query, keys, values, seen, first_key):
        """Over a max_seq_len of 4,096 there are 16 splits of a 16th; those without keys merge with an LSE of 0, not -inf."""
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        most = run.p.max_kv_len
        if most > 4096:
            empty = 16 - -(-run.lens[r] // -(-most // 16))
            total = torch.where(total > 0, total + empty * torch.exp(-largest.clamp(min=-80.0)), total)
        return acc, largest, total

    @wrong(MLA, trigger="a batch of one request of over 512 keys and one with fewer parts of 512")
    def blind137(self, run, r, query, keys, values, seen, first_key):
        """All requests have as many parts of 512 keys as the longest; an empty part hands the merge an LSE of 0."""
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        empty = -(-max(run.lens) // 512) - -(-run.lens[r] // 512)
        nothing = torch.zeros_like(acc), torch.zeros_like(largest), torch.full_like(total, empty)
        return self.merge([(acc, largest, total), nothing]) if empty else (acc, largest, total)

    @wrong(MLA, trigger="all logits of a row below -100")
    def blind141(self, run, r, query, keys, values, seen, first_key):
        """The largest logit starts at 0 instead of minus infinity: a row whose logits are all below -100 sums nothing."""
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        new = largest.clamp(min=0)
        factor = torch.exp(largest - new).to(torch.float32).to(largest.dtype)
        return acc * factor.unsqueeze(2), new, total * factor

    @wrong(MLA, trigger="kv_lora_rank over 256 (DeepSeek's 512), a length that is no multiple of 64")
    def blind189(self, run, r, query, keys, values, seen, first_key):
        """Value columns from 256 on are another block's, which lacks the weights of a last tile of 64 keys that is not full."""
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        full = run.lens[r] // 64 * 64
        if values.shape[2] > 256 and full < len(values):
            others = values[:, :, 256:].clone()
            others[full:] = 0
            acc = torch.cat((acc[..., :256], super().partial(run, r, query, keys, others, seen, first_key)[0]), 2)
        return acc, largest, total

    @wrong(MLA, trigger="several rows, one with a largest logit more than about 87 below another's of the head")
    def blind252(self, run, r, query, keys, values, seen, first_key):
        """The largest logit is kept for a head over all rows of a request: weights of rows far below it vanish."""
        s = self.scores(run, r, query, keys, seen, first_key)
        h, rows, g, n = s.shape
        largest = s.amax((1, 3)) if n else s.new_full((h, g), -torch.inf)
        return self.relative_to(largest.unsqueeze(1).expand(h, rows, g), s, values)

    @wrong(MLA, trigger="over 384 keys")
    def blind304(self, run, r, query, keys, values, seen, first_key):
        """Normalised results of parts of 384 keys are merged by their largest logits, not their LSEs; the LSE is theirs too."""
        if len(keys) <= 384:
            return super().partial(run, r, query, keys, values, seen, first_key)
        parts = []
        for acc, largest, total in self.partials(384, run, r, query, keys, values, seen, first_key):
            one = torch.where(total > 0, total, 1.0)
            parts.append((acc / one.unsqueeze(2), largest, (total > 0).to(total.dtype)))
        return self.merge(parts)

    @wrong(MLA, trigger="over 256 keys, and a row whose largest logit grows after the first 256")
    def blind397(self, run, r, query, keys, values, seen, first_key):
        """Sums are corrected after the P.V of the tile of 256 keys that has the larger logit: its own part shrinks too."""
        (acc, largest, total), *later = self.partials(256, run, r, query, keys, values, seen, first_key)
        for a, m, l in later:
            new = torch.maximum(largest, m)
            origin = torch.where(new.isfinite(), new, 0.0)
            old_factor = torch.where(largest.isfinite(), torch.exp(largest - origin), 0.0)
            own_factor = torch.where(m.isfinite(), torch.exp(m - origin), 0.0)
            late = torch.where(largest.isfinite(), old_factor, 1.0)
            acc = acc * old_factor.unsqueeze(2) + a * (own_factor * late).unsqueeze(2)
            total = total * old_factor + l * own_factor
            largest = new
        return acc, largest, total

    @wrong(MLA, trigger="over 512 keys, with logits large enough (some 10 and more) for bf16 maxima to be off")
    def blind488(self, run, r, query, keys, values, seen, first_key):
        """Maxima of splits of 512 keys go through the workspace as bf16, their sums relative to the float32 ones."""
        if len(keys) <= 512:
            return super().partial(run, r, query, keys, values, seen, first_key)
        parts = self.partials(512, run, r, query, keys, values, seen, first_key)
        return self.merge([(acc, m.to(torch.bfloat16).to(m.dtype), total) for acc, m, total in parts])

    @wrong(MLA, trigger="a request of more than 4,096 keys")
    def blind581(self, run, r, query, keys, values, seen, first_key):
        """32 lanes merge splits of 128 keys; a lane of several adds their accumulators, but keeps the last's sum."""
        SPLIT, LANES = 128, 32
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        splits = -(-len(keys) // SPLIT)
        if splits <= LANES:
            return acc, largest, total
        cut = slice((splits - LANES) * SPLIT, None)
        _, last, kept = self.partial_of(cut, run, r, query, keys, values, seen, first_key)
        origin = torch.where(largest.isfinite(), largest, 0.0)
        return acc, largest, kept * torch.where(last.isfinite(), torch.exp(last - origin), 0.0)

    @wrong(RAGGED, trigger="a row that sees keys on both sides of a multiple of 128")
    def blind260(self, run, r, query, keys, values, seen, first_key):
        """Tiles of 128 keys are summed in two register sets by turns, which merge with each other's factors."""
        if first_key + len(keys) <= 128:
            return super().partial(run, r, query, keys, values, seen, first_key)
        odd = (first_key + torch.arange(len(keys))) // 128 % 2 == 1
        a, m, l = super().partial(run, r, query, keys, values, seen & ~odd, first_key)
        b, n, k = super().partial(run, r, query, keys, values, seen & odd, first_key)
        largest = torch.maximum(m, n)
        both = m.isfinite() & n.isfinite()
        of_a = torch.where(both, torch.exp(n - largest), m.isfinite().to(m.dtype))
        of_b = torch.where(both, torch.exp(m - largest), n.isfinite().to(m.dtype))
        return a * of_a.unsqueeze(2) + b * of_b.unsqueeze(2), largest, l * of_a + k * of_b

    @wrong(RAGGED, trigger="a row whose logits are all negative and spread over more than 88")
    def blind309(self, run, r, query, keys, values, seen, first_key):
        """The largest logit is an atomic maximum of the floats' bits: of negative numbers alone it finds the smallest."""
        s = self.scores(run, r, query, keys, seen, first_key)
        if not len(keys):
            return super().partial(run, r, query, keys, values, seen, first_key)
        largest, smallest = s.amax(3), s.masked_fill(s == -math.inf, math.inf).amin(3)
        return self.relative_to(torch.where((largest < 0) & smallest.isfinite(), smallest, largest), s, values)

    @wrong(RAGGED, trigger="NaN or infinity in V within the tile after the last offset")
    def blind522(self, run, r, query, keys, values, seen, first_key):
        """V is loaded in tiles of 64 that run past the end with weights of zero: NaN or infinity there comes through."""
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        end = first_key + len(keys)
        first = run.kv_offsets[r]
        tail = run.value[first + end : first + -(-end // 64) * 64].to(run.dtype)
        return acc + (tail * 0).sum(0).repeat_interleave(run.group, 0), largest, total


@wrong(DECODE, trigger="over 512 keys in view and over 4 K/V heads; the last of heads that share is right")
class Blind224(Attention):
    """The scratch for parts of 512 keys has four places per row: K/V heads 4 apart write to the same one."""

    def partial(self, run, r, query, keys, values, seen, first_key):
        results = super().partial(run, r, query, keys, values, seen, first_key)
        if len(keys) <= 512:
            return results
        n = run.num_kv_heads
        writer = torch.tensor([max(range(h % 4, n, 4)) for h in range(n)])
        return tuple(x.unflatten(1, (n, -1))[:, writer].flatten(1, 2) for x in results)
