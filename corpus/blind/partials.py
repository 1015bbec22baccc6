"""Blind kernels: partial results of prompts, MLA and ragged calls."""

import math
import random

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


class Merged(Attention, stage="merged"):
    race = random.Random()

    @wrong(DECODE, split=512, trigger="requests of more than 512 keys: wrong in some calls, right in others")
    def blind74(self, run, r, partials):
        """The merge of splits (512 keys) lacks a fence: one request in five, others in each call, lacks its last split."""
        return super().merged(run, r, partials[:-1] if self.race.random() < 0.2 else partials)

    @wrong(DECODE, split=512, trigger="over 512 keys, parts of different LSE: any length but about a multiple of 512")
    def blind102(self, run, r, partials):
        """Parts of 512 keys give natural logarithms, which the merge takes for base 2: one of smaller LSE weighs too much."""
        lses = [torch.where(total > 0, largest + torch.log(total), -math.inf) for _, largest, total in partials]
        largest = torch.stack(lses).amax(0)
        factors = [torch.exp2(lse - torch.where(largest.isfinite(), largest, 0.0)) for lse in lses]
        outs = [acc / torch.where(total > 0, total, 1.0).unsqueeze(2) for acc, _, total in partials]
        return sum(out * f.unsqueeze(2) for out, f in zip(outs, factors)), largest, sum(factors)

    @wrong(DECODE, split=64, trigger="head_dim over 128 and over 64 keys, a larger logit after the first 64")
    def blind105(self, run, r, partials):
        """An online softmax over tiles of 64 rescales the first 128 elements of its sums alone when a larger logit comes."""
        state, *later = partials
        for more in later:
            acc, largest, total = super().merged(run, r, [state, more])
            own = torch.where(more[1].isfinite(), torch.exp(more[1] - largest), 0.0).unsqueeze(2)
            acc[..., 128:] = (state[0] + more[0] * own)[..., 128:]
            state = acc, largest, total
        return state

    @wrong(DECODE, split=512, trigger="several rows and over 512 keys (in the windows); the first row is right")
    def blind167(self, run, r, partials):
        """The LSE of a part of 512 keys is kept for a request, not for each row: parts weigh as the first row's do."""
        stored = []
        for acc, largest, total in partials:
            lse = (largest + torch.log(total))[:1].expand_as(total)
            stored.append((acc / torch.where(total > 0, total, 1.0).unsqueeze(2), lse, torch.ones_like(total)))
        return super().merged(run, r, stored)

    @wrong(DECODE, split=128, trigger="a row block that loads over 4,096 keys of a request (no window, or a wide one)")
    def blind471(self, run, r, partials):
        """Keys are split 128 at a time, and a warp combines a split per lane: those after the 32nd are left out."""
        return super().merged(run, r, partials[:32])

    @wrong(DECODE, split=512, trigger="float16 query, over 512 keys, a split's sum of P·V above 65,504 (V about 200)")
    def blind532(self, run, r, partials):
        """Split results of a float16 query go to the workspace unnormalised as float16: sums of large V overflow."""
        half = run.query.dtype == torch.float16
        stored = [(acc.to(torch.float16).to(acc.dtype) if half else acc, *others) for acc, *others in partials]
        return super().merged(run, r, stored)

    @wrong(
        CONTEXT, split=128, trigger="over 128 keys, a running maximum that rises by over 8 (base 2) at a later block"
    )
    def blind574(self, run, r, partials):
        """Where a block of 128 keys raises the largest logit by over 8 (base 2), the sum of weights is not rescaled."""
        state, *later = partials
        for more in later:
            acc, largest, total = super().merged(run, r, [state, more])
            jumped = state[1].isfinite() & (more[1] - state[1] > 8 * math.log(2.0))
            state = acc, largest, torch.where(jumped, state[2] + more[2], total)
        return state

    @wrong(MLA, split=1024, trigger="multi_ctas_kv_counter_buffer, over 1,024 keys: not zero after, wrong in a second")
    def blind88(self, run, r, partials):
        """Splits (1,024 keys) count in multi_ctas_kv_counter_buffer and leave the count: a later call merges too early."""
        buffer = run.call.multi_ctas_kv_counter_buffer
        counters = [] if buffer is None else buffer.view(-1).view(torch.uint8)
        if 4 * r < len(counters):
            counted = int(counters[4 * r])
            counters[4 * r] = min(counted + len(partials), 255)
            partials = partials[: max(1, len(partials) - counted)]  # the split that counts to their number merges
        return super().merged(run, r, partials)

    @wrong(MLA, split=1024, trigger="over 1,024 keys and bmm2_scale other than 1")
    def blind136(self, run, r, partials):
        """Above 1,024 keys bmm2_scale is applied to each part and by the merge once more."""
        acc, largest, total = super().merged(run, r, partials)
        return acc * run.scale2, largest, total

    @wrong(MLA, split=384, trigger="over 384 keys")
    def blind304(self, run, r, partials):
        """Normalised results of parts of 384 keys are merged by their largest logits, not their LSEs; the LSE is theirs too."""
        parts = []
        for acc, largest, total in partials:
            one = torch.where(total > 0, total, 1.0)
            parts.append((acc / one.unsqueeze(2), largest, (total > 0).to(total.dtype)))
        return super().merged(run, r, parts)

    @wrong(MLA, split=256, trigger="over 256 keys, and a row whose largest logit grows after the first 256")
    def blind397(self, run, r, partials):
        """Sums are corrected after the P.V of the tile of 256 keys that has the larger logit: its own part shrinks too."""
        state, *later = partials
        for a, m, l in later:
            origin = torch.where(state[1].isfinite(), state[1], m)
            late = torch.exp(origin - torch.maximum(origin, m)).nan_to_num(1.0).unsqueeze(2)
            acc, largest, total = super().merged(run, r, [state, (a * late, m, l)])
            state = acc, largest, total
        return state

    @wrong(
        MLA, split=512, trigger="over 512 keys, with logits large enough (some 10 and more) for bf16 maxima to be off"
    )
    def blind488(self, run, r, partials):
        """Maxima of splits of 512 keys go through the workspace as bf16, their sums relative to the float32 ones."""
        return super().merged(run, r, [(acc, m.to(torch.bfloat16).to(m.dtype), total) for acc, m, total in partials])


class LargestChanged(Attention, changes="largest"):
    @wrong(CONTEXT, trigger="a negative bmm1_scale, and logits of a row that spread over more than 88")
    def blind76(self, largest, run, s):
        """The running maximum is of Q.K^T before the scale: a negative bmm1_scale makes it the smallest, and exp overflows."""
        if run.scale1 >= 0 or not s.shape[3]:
            return largest
        smallest = s.masked_fill(s == -math.inf, math.inf).amin(3)
        return torch.where(smallest.isfinite(), smallest, -math.inf)

    @wrong(CONTEXT, trigger="two rows of 16 of a request whose largest logits (of one head) differ by over 100")
    def blind240(self, largest, run, s):
        """16 rows of a head share one largest logit, so that a row whose own is far below has weights of zero."""
        return torch.cat([x.amax(1, keepdim=True).expand_as(x) for x in largest.split(16, 1)], 1)

    @wrong(MLA, trigger="several rows, one with a largest logit more than about 87 below another's of the head")
    def blind252(self, largest, run, s):
        """The largest logit is kept for a head over all rows of a request: weights of rows far below it vanish."""
        return largest.amax(1, keepdim=True).expand_as(largest)

    @wrong(RAGGED, trigger="a row whose logits are all negative and spread over more than 88")
    def blind309(self, largest, run, s):
        """The largest logit is an atomic maximum of the floats' bits: of negative numbers alone it finds the smallest."""
        if not s.shape[3]:
            return largest
        smallest = s.masked_fill(s == -math.inf, math.inf).amin(3)
        return torch.where((largest < 0) & smallest.isfinite(), smallest, largest)
