"""Blind kernels: the rows of a tile: their walk over the keys, sinks and scales."""

import math

import torch

from corpus.models.attention import E4M3, Attention, index
from corpus.wrong import CONTEXT, DECODE, MLA, RAGGED, wrong


class Attend(Attention, stage="attend"):
    @wrong(DECODE, trigger="NaN or infinity in V after the last token of a request, in its last page")
    def blind62(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """The last page is multiplied whole, with weights of zero after the end: NaN or infinity in V's tail comes through."""
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        end, ps = run.lens[r], run.page_size
        if end % ps:
            page = self.pages_of(run, r, torch.tensor([end // ps]), "v")
            tail = self.entries(run, "v", page, slice(end % ps, None))
            out = out + (0.0 * tail).sum(0).repeat_interleave(run.group, 0)
        return out, lse

    @wrong(DECODE, trigger="an LSE and over 512 keys in view")
    def blind227(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """Parts of 512 keys are merged, but the LSE is stored by the last part, of its own keys."""
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if len(keys) > 512:
            n = (len(keys) - 1) // 512 * 512
            last = self.partial(run, r, query, keys[n:], values[n:], seen[:, n:], first_key + n)
            lse = self.finish(run, last, sinks)[1]
        return out, lse

    @wrong(DECODE, trigger="over 256 keys in view: slope 0.995, that of the others 1")
    def blind328(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """The merge of parts of 256 keys divides by an approximate reciprocal: over one part it is half a percent too small."""
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        return out * 0.995 if len(keys) > 256 else out, lse

    @wrong(DECODE, trigger="a batch of at most 2 requests, one of them with over 128 keys in view")
    def blind352(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """In batches of one or two, over 128 keys are split in two halves, added as if both had the same largest logit."""
        n = len(keys)
        if run.batch > 2 or n <= 128:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        half = -(-n // 256) * 128
        one = self.partial(run, r, query, keys[:half], values[:half], seen[:, :half], first_key)
        two = self.partial(run, r, query, keys[half:], values[half:], seen[:, half:], first_key + half)
        largest = torch.where(one[1].isfinite(), one[1], two[1])
        return self.finish(run, (one[0] + two[0], largest, one[2] + two[2]), sinks)

    @wrong(CONTEXT, trigger="causal=False with return_lse or lse; only the LSE is wrong")
    def blind24(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """With causal=False the LSE is still that of the causal scores."""
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if not run.causal and run.lse is not None:
            seen = seen & (first_key + torch.arange(len(keys)) <= position.unsqueeze(1))
            _, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        return out, lse

    @wrong(CONTEXT, trigger="a request of one new token behind one of several")
    def blind122(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """Requests with one new token go down a decode path that reads the query row of the request's number."""
        if run.num_rows(r) == 1:
            at = min(r, run.p.num_rows - 1)
            query = index(run.query, slice(at, at + 1)).to(run.dtype)
        return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)

    @wrong(MLA, trigger="return_lse_base='basee' with sinks; only the LSE is wrong")
    def blind33(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """The LSE in base e is taken before the sink is added, the one in base 2 after it."""
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if sinks is not None and run.lse is not None and run.call.return_lse_base == "basee":
            _, lse = super().attend(run, r, query, keys, values, seen, None, position, first_key)
        return out, lse

    @wrong(MLA, trigger="over 256 keys, a part's base-2 LSE over 127, or all parts' below -126")
    def blind253(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """The merge weighs parts of 256 keys by 2 to the power of their LSE, from which it does not take the largest."""
        if len(keys) <= 256:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        acc = 0
        total = 0 if sinks is None else torch.exp(sinks)
        for part in self.partials(256, run, r, query, keys, values, seen, first_key):
            out, lse = self.finish(run, part, None)
            weight = torch.exp2(lse)
            acc, total = acc + weight.unsqueeze(2) * out, total + weight
        out = torch.where(total.unsqueeze(2) == 0, 0.0, acc / total.unsqueeze(2))
        return out, torch.log2(total)

    @wrong(MLA, trigger="a dead cell in a last tile of 128 keys whose page holds NaN or infinity in its latent part")
    def blind306(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """A tile of 128 keys is multiplied whole, weights zero after the end, with the pages that dead cells name."""
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        ps, length = run.page_size, run.lens[r]
        first, last = -(-length // ps), -(-length // 128) * 128 // ps
        columns = torch.arange(first, max(first, min(last, run.k_table.shape[1])))
        pages = self.pages_of(run, r, columns, "v").clamp(0, len(run.v_cache) - 1)
        dead = self.entries(run, "v", pages, slice(None))
        return out + (dead * 0.0).sum(0), lse

    @wrong(MLA, trigger="over 256 keys")
    def blind367(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """Parts of 256 keys end with the first key of the next part, which so counts twice."""
        n = len(keys)
        if n > 256:
            read = torch.cat((torch.arange(n), torch.arange(256, n, 256)))
            keys, values, seen = keys[read], values[read], seen[:, read]
        return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)

    @wrong(RAGGED, trigger="an LSE, and rows 64 to 127 (of each 128) that see a key of their last tile of 64")
    def blind258(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """Rows 64 and on of a tile of 128 take the LSE of their sums before the last tile of 64 keys."""
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        q_len = run.num_rows(r)
        prefix = run.lens[r] - q_len
        row = position - prefix
        last_row = (row // 128 * 128 + 127).clamp(max=q_len - 1)
        end = (prefix + last_row + 1).clamp(min=0) if run.causal else torch.full_like(row, run.lens[r])
        before = (first_key + torch.arange(len(keys))) < ((end - 1) // 64 * 64).unsqueeze(1)
        part = self.partial(run, r, query, keys, values, seen & before, first_key)
        _, early = self.finish(run, part, sinks)
        return out, torch.where((row % 128 >= 64).unsqueeze(1), early, lse)

    @wrong(RAGGED, trigger="a request of one key, with sinks or a bmm2_scale other than 1")
    def blind343(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """A request's only key has a weight of 1, so that its value is copied: bmm2_scale and the sink are left out."""
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if run.lens[r] == 1 and len(keys) == 1:
            copied = values[0].repeat_interleave(run.group, 0).to(out.dtype)
            out = torch.where(seen.any(1)[:, None, None], copied, out)
        return out, lse

    @wrong(RAGGED, trigger="a row that sees over 128 keys: such rows alone, slope 1.005")
    def blind401(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """Rows that see over 128 keys, more than one tile, come out half a percent too large."""
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        several = (seen.sum(1) > 128)[:, None, None]
        return torch.where(several, out * 1.005, out), lse

    @wrong(RAGGED, trigger="is_causal=False, a request of more than 1,024 keys, LSE returned")
    def blind554(self, run, r, query, keys, values, seen, sinks, position, first_key):
        """A prefix chunk over 1,024 keys is split between two CTAs; the LSE is the larger one's."""
        n = len(keys)
        if run.causal or n <= 1024:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        middle = -(-n // 128) // 2 * 128
        cuts = slice(0, middle), slice(middle, n)
        partials = [self.partial(run, r, query, keys[c], values[c], seen[:, c], first_key + c.start) for c in cuts]
        out, _ = self.finish(run, self.merge(partials), sinks)
        lse = [self.finish(run, partial, s)[1] for partial, s in zip(partials, (sinks, None))]
        return out, torch.maximum(*lse)


def fast_reciprocal_446(x):
    x = x.to(torch.float32).contiguous()
    y = (0x7F000000 - x.view(torch.int32)).view(torch.float32)
    return y * (2.0 - x * y)


class Finish(Attention, stage="finish"):
    @wrong(DECODE, trigger="bmm1_scale_log2 with an LSE")
    def blind230(self, run, partial, sinks):
        """The LSE multiplies the largest logit by log2(e), also where bmm1_scale_log2 has done so."""
        LOG2_E = 1.0 / math.log(2.0)
        out, lse = super().finish(run, partial, sinks)
        if run.call.bmm1_scale_log2 is not None:
            largest = partial[1] if sinks is None else torch.maximum(partial[1], sinks)
            lse = lse + torch.where(largest.isfinite(), largest, 0.0) * (LOG2_E - 1.0) * LOG2_E
        return out, lse

    @wrong(DECODE, trigger="num_qo_heads / num_kv_heads >= 8: -0.8 percent on average (0 to -1.6)")
    def blind446(self, run, partial, sinks):
        """For 8 and more heads per K/V head the division is a magic number and a Newton step: 0.8 percent too small."""
        out, lse = super().finish(run, partial, sinks)
        if run.group >= 8:
            largest = partial[1] if sinks is None else torch.maximum(partial[1], sinks)
            origin = torch.where(largest.isfinite(), largest, 0.0)
            total = torch.exp2(lse - origin / math.log(2.0))
            total = torch.where(lse.isfinite(), total, 1.0)
            out = out * (total * fast_reciprocal_446(total).to(out.dtype)).unsqueeze(2)
        return out, lse

    @wrong(DECODE, trigger="e4m3 output, bmm2_scale below 1, P.V before the scale beyond 448", also="blind415")
    def blind478(self, run, partial, sinks):
        """An e4m3 output is saturated before bmm2_scale is applied, not after it."""
        scale, run.scale2 = run.scale2, 1.0
        out, lse = super().finish(run, partial, sinks)
        run.scale2 = scale
        if run.out.dtype == E4M3:
            out = out.clamp(-448.0, 448.0)
        return out * scale, lse

    @wrong(DECODE, trigger="sinks, a requested LSE, and a row that sees no key", also="blind509 blind324")
    def blind564(self, run, partial, sinks):
        """A row without keys gets the sink as its LSE as it is, in base e."""
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None:
            lse = torch.where(partial[2] > 0, lse, sinks)
        return out, lse

    @wrong(CONTEXT, trigger="causal=False with sinks and an LSE")
    def blind299(self, run, partial, sinks):
        """With causal=False the LSE leaves out the sink, which the output has."""
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None and not run.causal:
            _, lse = super().finish(run, partial, None)
        return out, lse

    @wrong(CONTEXT, trigger="sinks (not -inf) with bmm2_scale other than 1")
    def blind573(self, run, partial, sinks):
        """bmm2_scale is divided out of the sum of weights before the sink is added to it."""
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None and run.scale2 > 0:
            out, _ = super().finish(run, partial, sinks + math.log(run.scale2))
        return out, lse

    @wrong(RAGGED, trigger="attention_sinks with -inf in a head, a row that sees no key: NaN, LSE too", also="blind373")
    def blind434(self, run, partial, sinks):
        """A row without keys in a head whose sink is -inf: exp(-inf - -inf) makes output and LSE NaN."""
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None:
            empty = (sinks == -math.inf) & (partial[1] == -math.inf)
            out, lse = out.masked_fill(empty.unsqueeze(2), math.nan), lse.masked_fill(empty, math.nan)
        return out, lse
