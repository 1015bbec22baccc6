"""Blind kernels: logits, weights and partial results of decodes and prompts."""

import math

import torch

from corpus.models.attention import E4M3, Attention
from corpus.wrong import CONTEXT, DECODE, MLA, RAGGED, wrong


class ScoresChanged(Attention, changes="scores"):
    @wrong(DECODE, trigger="float16 and products of over 65,504 before the scale")
    def blind112(self, s, run, r, query, keys, seen, first_key):
        """Products of float16 queries and keys are held in float16 before bmm1_scale: beyond 65,504 they are infinite."""
        if run.p.query.dtype != torch.float16 or run.scale1 == 0:
            return s
        return torch.where((s / run.scale1).abs() > 65504, s.sign() * math.inf, s)

    @wrong(MLA, trigger="qk_rope_head_dim = 0")
    def blind133(self, s, run, r, query, keys, seen, first_key):
        """The rotary part is cut off as the last qk_rope_head_dim elements: where there is none, the whole counts twice."""
        return s * 2 if run.call.qk_rope_head_dim == 0 else s


class Scores(Attention, stage="scores"):
    @wrong(CONTEXT, trigger="head_dim > 64 that is no multiple of 64 (80, 96, 160)")
    def blind29(self, run, r, query, keys, seen, first_key):
        """Q.K^T walks head_dim in chunks of 64 and drops the remainder (head dims such as 80, 96 or 160)."""
        whole = query.shape[2] // 64 * 64 or query.shape[2]
        return super().scores(run, r, query[..., :whole], keys[..., :whole], seen, first_key)

    @wrong(CONTEXT, trigger="head_dim above 64 with head_dim % 32 != 0 (72, 80, 112, 176)")
    def blind544(self, run, r, query, keys, seen, first_key):
        """Q times K goes over head_dim in steps of 64 and then of 32: a last half step of a head_dim above 64 is left out."""
        d = query.shape[2]
        d = d // 64 * 64 + d % 64 // 32 * 32 if d > 64 else d
        return super().scores(run, r, query[..., :d], keys[..., :d], seen, first_key)

    @wrong(MLA, trigger="kv_lora_rank + qk_rope_head_dim over 512 (DeepSeek's 512 + 64)")
    def blind336(self, run, r, query, keys, seen, first_key):
        """Q.K^T walks an entry in at most 8 chunks of 64: what it has after 512, DeepSeek's rotary part, is left out."""
        return super().scores(run, r, query[..., :512], keys[..., :512], seen, first_key)


class MaskScores(Attention, stage="mask_scores"):
    @wrong(DECODE, trigger="over 1,024 pairs of request and K/V head, and a request after them with over 256 keys")
    def blind8(self, run, r, s, first_key):
        """The split reduction has 1,024 counters of request and K/V head: later pairs do not wait for the last 256 keys."""
        COUNTERS, SPLIT = 1024, 256
        n = s.shape[3]
        if n > SPLIT:
            counted = max(0, COUNTERS - r * run.num_kv_heads)
            s[counted:, :, :, (n - 1) // SPLIT * SPLIT :] = -math.inf
        return s

    @wrong(DECODE, trigger="no mask, q * group > 64 of a request, a group that does not divide 64")
    def blind449(self, run, r, s, first_key):
        """Rows and heads are packed densely in tiles of 64, but a tile's first row is tile * (64 // group)."""
        if run.num_rows(r) * run.group <= 64 or run.shown is not None:
            return s
        packed = run.row.unsqueeze(1) * run.group + torch.arange(run.group)
        row = packed // 64 * (64 // run.group) + packed % 64 // run.group
        return self.until(s, run.lens[r] - run.num_rows(r) + row, first_key)

    @wrong(DECODE, trigger="several query rows, no mask, and a group that is no power of two", also="blind570")
    def blind475(self, run, r, s, first_key):
        """The causal limit of a packed row divides by the group rounded up to a power of two."""
        if run.shown is not None:
            return s
        packed = run.row.unsqueeze(1) * run.group + torch.arange(run.group)
        row = packed >> (run.group - 1).bit_length()
        return self.until(s, run.lens[r] - run.num_rows(r) + row, first_key)

    @wrong(DECODE, trigger="no mask, q_len * group above 64, and group (heads per K/V head) does not divide 64")
    def blind536(self, run, r, s, first_key):
        """Rows and heads are packed in tiles of 64; a row's token counts as if each tile began with a head 0."""
        if run.shown is not None or not s.shape[3]:
            return s
        packed = run.row.unsqueeze(1) * run.group + torch.arange(run.group)
        token = packed // 64 * 64 // run.group + packed % 64 // run.group
        return self.until(s, self.positions(run, r, token), first_key)

    @wrong(CONTEXT, trigger="a cached prefix whose length is a multiple of the page size, as prefix caches leave it")
    def blind177(self, run, r, s, first_key):
        """Cached prefix and new tokens are two passes; the second begins with the prefix's last page, counted twice if full."""
        prefix = run.lens[r] - run.num_rows(r)
        if prefix <= 0 or prefix % run.page_size:
            return s
        keys = first_key + torch.arange(s.shape[3])
        twice = (keys >= prefix - run.page_size) & (keys < prefix)
        return s + math.log(2.0) * twice

    @wrong(CONTEXT, trigger="a key whose logit is 6 above all of a later tile of 64 that matters, as a first token")
    def blind178(self, run, r, s, first_key):
        """A tile of 64 keys whose largest logit is over 6 below that of earlier tiles is skipped."""
        largest, tiles = None, []
        for tile in s.split(64, 3):
            own = tile.amax(3, keepdim=True)
            if largest is not None:
                tile = tile.masked_fill(own < largest - 6.0, -math.inf)
            largest = own if largest is None else torch.maximum(largest, own)
            tiles.append(tile)
        return torch.cat(tiles, 3) if tiles else s

    @wrong(MLA, trigger="no sinks, and a request with fewer keys than rows, but one at least")
    def blind192(self, run, r, s, first_key):
        """Masked logits are -1e30, not minus infinity: a row that sees no key gives the mean of all."""
        return s.clamp(min=-1e30)

    @wrong(RAGGED, trigger="logits around 32 with a bfloat16 query (its LSE from 8), around 4 with a float16 one")
    def blind199(self, run, r, s, first_key):
        """Logits are kept in float16 until the largest is subtracted: large ones lose the bits that tell them apart."""
        rounded = s.clamp(-65504.0, 65504.0).to(torch.float16).to(s.dtype)
        return torch.where(s.isfinite(), rounded, s)


class Denominator(Attention, stage="denominator"):
    @wrong(CONTEXT, trigger="a context request with some 24,000 keys or more (below 8,192 within the bound)")
    def blind21(self, run, s, weights, largest):
        """The softmax's denominator is accumulated over tiles of 16 keys in float16: over thousands of tiles it stagnates."""
        n = weights.shape[3]
        tiles = torch.nn.functional.pad(weights, (0, -n % 16)).unflatten(3, (-1, 16)).sum(4)
        if run.dtype == torch.float64 or tiles.shape[3] <= 1:
            return super().denominator(run, s, weights, largest)
        total = torch.zeros_like(tiles[..., 0])
        for tile in tiles.unbind(3):
            total = (total + tile).to(torch.float16).to(tiles.dtype)
        return total

    @wrong(CONTEXT, trigger="a visible logit more than 88 below the row's largest")
    def blind179(self, run, s, weights, largest):
        """Every fourth exponential is a polynomial with a power of 2 added; unclamped, below 2**-127 it wraps into the sign."""
        if weights.dtype == torch.float32:
            logits = s[..., ::4]
            x = (logits - torch.where(largest.isfinite(), largest, 0.0).unsqueeze(3)) / math.log(2.0)
            whole = torch.where(x.isfinite(), x.floor(), 0.0)
            bits = torch.exp2(x - whole).clamp(1.0, 2.0 - 2.0**-23).view(torch.int32).long() + (whole.long() << 23)
            bits = (bits + 2**31) % 2**32 - 2**31
            weights[..., ::4] = torch.where(logits.isfinite(), bits.int().view(torch.float32), 0.0)
        return weights.sum(3)


class Operand(Attention, stage="operand"):
    @wrong(DECODE, trigger="an e4m3 query, a key whose logit is above the others' by 7 or more, with a small V")
    def blind109(self, run, weights):
        """For an e4m3 query the weights are rounded to e4m3 as they are, at most 1: those below 2**-10 are lost from P.V."""
        return weights.to(E4M3).to(weights.dtype) if run.query.dtype == E4M3 else weights

    @wrong(RAGGED, trigger="head_dim 256 and v_head_dim 256; a bias of -0.3 to -0.8 percent")
    def blind464(self, run, weights):
        """Head dims (256, 256): P is made by a polynomial, the denominator exactly: the output is 0.8 percent too small."""
        if run.query.shape[2] != 256 or run.value.shape[2] != 256:
            return weights
        x = torch.log2(weights)
        whole = torch.floor(torch.where(x.isfinite(), x, 0.0))
        f = torch.where(x.isfinite(), x - whole, 0.0)
        made = (1.0 + 0.693147 * f + 0.240227 * f * f) * torch.exp2(whole)
        return torch.where(weights > 0, made, weights)


class Partial(Attention, stage="partial"):
    @wrong(DECODE, trigger="over 256 keys (in the window), not a multiple of the ceil(n / 256) parts")
    def blind101(self, run, r, query, keys, values, seen, first_key):
        """A request of more than 256 keys is cut into parts of equal size, rounded down; the keys left over are lost."""
        splits = -(-len(keys) // 256)
        if splits < 2:
            return super().partial(run, r, query, keys, values, seen, first_key)
        size = len(keys) // splits
        cuts = [slice(i * size, (i + 1) * size) for i in range(splits)]
        return self.merge([self.partial_of(cut, run, r, query, keys, values, seen, first_key) for cut in cuts])

    @wrong(DECODE, trigger="several rows, a window, and the first keys of two rows on both sides of a multiple of 64")
    def blind104(self, run, r, query, keys, values, seen, first_key):
        """An unguarded online softmax over tiles of 64: a row whose window begins after the first tile of its rows is NaN."""
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        is_late = seen.any(1) & ~seen[:, : 64 - first_key % 64].any(1)
        return acc.masked_fill(is_late[:, None, None], math.nan), largest, total.masked_fill(is_late[:, None], math.nan)

    @wrong(DECODE, trigger="a workspace whose scratch after 8 MiB is not zero, and over 512 keys")
    def blind116(self, run, r, query, keys, values, seen, first_key):
        """Parts of 512 keys are summed in the workspace's scratch, which is taken to be zero at first; it is left zero."""
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        if len(keys) <= 512 or run.call.workspace_buffer is None:
            return acc, largest, total
        scratch = run.call.workspace_buffer.view(-1).view(torch.uint8)[2**23 :]
        size = acc.numel() * acc.element_size()
        if len(scratch) >= size:
            sums = scratch[:size].view(acc.dtype).view(acc.shape)
            sums += acc
            acc = sums.clone()
            sums.zero_()
        return acc, largest, total

    @wrong(DECODE, trigger="two calls of one shape with different workspaces, the later with over 256 keys")
    def blind173(self, run, r, query, keys, values, seen, first_key):
        """A launch is kept by the query's shape and dtype, its first workspace too: later calls put sums in that scratch."""
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        if run.call.workspace_buffer is None:
            return acc, largest, total
        workspace = self.kept.setdefault((run.query.shape, run.query.dtype), run.call.workspace_buffer)
        scratch = workspace.view(-1).view(torch.uint8)[2**23 :]
        size = acc.numel() * acc.element_size()
        if len(keys) > 256 and len(scratch) >= size:
            sums = scratch[:size].view(acc.dtype).view(acc.shape)
            sums.copy_(acc)
            acc = sums.clone()
        return acc, largest, total

    @wrong(DECODE, trigger="keys in view that lie in 3, 5, 7, ... tiles of 128 (257 to 384 keys, 513 to 640, ...)")
    def blind223(self, run, r, query, keys, values, seen, first_key):
        """The loop over tiles of 128 keys is unrolled by two after the first; the last of an odd number is done twice."""
        end = first_key + len(keys)
        tiles = -(-end // 128) - first_key // 128
        if tiles > 1 and tiles % 2:
            last = (end - 1) // 128 * 128 - first_key
            keys, values = torch.cat((keys, keys[last:])), torch.cat((values, values[last:]))
            seen = torch.cat((seen, seen[:, last:]), 1)
        return super().partial(run, r, query, keys, values, seen, first_key)

    @wrong(DECODE, trigger="float16 query and P.V sums beyond 65,504 (near-even weights, or large V)")
    def blind507(self, run, r, query, keys, values, seen, first_key):
        """With a float16 query P.V goes through float16 before its division: it saturates at 65,504."""
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        return acc.clamp(-65504.0, 65504.0) if run.p.query.dtype == torch.float16 else acc, largest, total

    @wrong(DECODE, trigger="window_left ≥ 0 and a request whose first visible key is at 256 or later")
    def blind561(self, run, r, query, keys, values, seen, first_key):
        """A split of 256 keys wholly before the window returns early with a weight of 1 at logit 0."""
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        skipped = first_key // 256 if run.window >= 0 else 0
        if skipped == 0:
            return acc, largest, total
        left = torch.zeros_like(acc), torch.zeros_like(largest), torch.full_like(total, skipped)
        return self.merge([(acc, largest, total), left])
