"""Wrong kernels of the decode call, written without a look at the checks: numbers 101 to 117."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, decode_of, index
from lab.references.quantization import dequantize_nvfp4


@wrong(decode_of, trigger="over 256 keys (in the window), not a multiple of the ceil(n / 256) parts")
class Blind101(Kernel):
    """A request of more than 256 keys is cut into parts of equal size, rounded down; the keys left over are lost."""

    def partial(self, run, r, query, keys, values, seen, first_key):
        part = super().partial
        splits = -(-len(keys) // 256)
        if splits < 2:
            return part(run, r, query, keys, values, seen, first_key)
        size = len(keys) // splits
        cuts = [slice(i * size, (i + 1) * size) for i in range(splits)]
        return self.merge([part(run, r, query, keys[c], values[c], seen[:, c], first_key + c.start) for c in cuts])


@wrong(decode_of, trigger="over 512 keys, parts of different LSE: any length but about a multiple of 512")
class Blind102(Kernel):
    """Parts of 512 keys give natural logarithms, which the merge takes for base 2, so that a part of smaller LSE
    weighs too much.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        part = super().partial
        if len(keys) <= 512:
            return part(run, r, query, keys, values, seen, first_key)
        outs, lses = [], []
        for start in range(0, len(keys), 512):
            c = slice(start, start + 512)
            acc, largest, total = part(run, r, query, keys[c], values[c], seen[:, c], first_key + start)
            outs.append(acc / torch.where(total > 0, total, 1.0).unsqueeze(2))
            lses.append(torch.where(total > 0, largest + torch.log(total), -math.inf))
        largest = torch.stack(lses).amax(0)
        origin = torch.where(largest.isfinite(), largest, 0.0)
        factors = [torch.exp2(lse - origin) for lse in lses]
        return sum(out * f.unsqueeze(2) for out, f in zip(outs, factors)), largest, sum(factors)


@wrong(
    decode_of,
    trigger=(
        "a window whose first key is not the first of its page, and NaN or infinity in V of the page's keys before it"
    ),
)
class Blind103(Kernel):
    """A window is read from the edge of its first page on; weights of zero do not silence V before it that is not
    finite.
    """

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start // run.page_size * run.page_size, end


@wrong(decode_of, trigger="several rows, a window, and the first keys of two rows on both sides of a multiple of 64")
class Blind104(Kernel):
    """An online softmax over tiles of 64 keys without a guard: a row whose window begins after the first tile of its
    request's rows is NaN.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        rows, heads = query.shape[:2]
        acc = query.new_zeros(rows, heads, values.shape[2])
        largest = query.new_full((rows, heads), -math.inf)
        total = query.new_zeros(rows, heads)
        edges = [0, *range(64 - first_key % 64, len(keys), 64), len(keys)]
        for start, end in zip(edges, edges[1:]):
            c = slice(start, end)
            a, m, l = super().partial(run, r, query, keys[c], values[c], seen[:, c], first_key + start)
            new = torch.maximum(largest, m)
            old, own = torch.exp(largest - new), torch.exp(m - new)
            acc = acc * old.unsqueeze(2) + a * own.unsqueeze(2)
            total = total * old + l * own
            largest = new
        sees = seen.any(1)
        acc[~sees], largest[~sees], total[~sees] = 0, -math.inf, 0
        return acc, largest, total


@wrong(decode_of, trigger="head_dim over 128 and over 64 keys, a larger logit after the first 64")
class Blind105(Kernel):
    """An online softmax over tiles of 64 keys that rescales the first 128 elements of its sums alone when a larger
    logit comes.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        rows, heads = query.shape[:2]
        acc = query.new_zeros(rows, heads, values.shape[2])
        largest = query.new_full((rows, heads), -math.inf)
        total = query.new_zeros(rows, heads)
        for start in range(0, len(keys), 64):
            c = slice(start, start + 64)
            a, m, l = super().partial(run, r, query, keys[c], values[c], seen[:, c], first_key + start)
            new = torch.maximum(largest, m)
            origin = torch.where(new.isfinite(), new, 0.0)
            old, own = torch.exp(largest - origin), torch.where(m.isfinite(), torch.exp(m - origin), 0.0)
            acc[..., :128] *= old.unsqueeze(2)
            acc += a * own.unsqueeze(2)
            total = total * old + l * own
            largest = new
        return acc, largest, total


@wrong(decode_of, trigger="a mask of 33 to 48 rows")
class Blind106(Kernel):
    """A row of the draft mask is taken to have ceil(q_len / 16) words, two at least, although rows are aligned to 32
    bits.
    """

    def unpack(self, run, mask):
        q_len = mask.shape[1]
        words = max(2, -(-q_len // 16))
        packed = mask.to(torch.int32).flatten(1)[:, : q_len * words].unflatten(1, (q_len, words))
        bits = (packed.unsqueeze(-1) >> torch.arange(16, dtype=torch.int32)) & 1
        return bits.flatten(2)[:, :, :q_len].bool()


@wrong(decode_of, trigger="a mask of over 16 rows, of which one shows token 15 and hides one of 16 to 31")
class Blind107(Kernel):
    """Two words of the draft mask are joined as signed numbers: where a row sees draft token 15 it sees tokens 16 to
    31 too.
    """

    def unpack(self, run, mask):
        words = mask.view(torch.int16).to(torch.int32)
        pairs = words[..., 0::2] | (words[..., 1::2] << 16)
        bits = (pairs.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.flatten(2)[:, :, : mask.shape[1]].bool()


@wrong(decode_of, trigger="uint32 seq_lens, several rows, a request with fewer keys than rows")
class Blind108(Kernel):
    """The position of a row is computed in the dtype of seq_lens; of uint32 lengths one before the first key wraps
    around and sees all keys.
    """

    def positions(self, run, r, row):
        position = super().positions(run, r, row)
        return position % 2**32 if run.p.seq_lens.dtype == torch.uint32 else position


@wrong(decode_of, trigger="an e4m3 query, a key whose logit is above the others' by 7 or more, with a small V")
class Blind109(Kernel):
    """For an e4m3 query the weights are rounded to e4m3 as they are, at most 1, so that those below 2**-10 are lost
    from the sum over V.
    """

    def operand(self, run, weights):
        return weights.to(E4M3).to(weights.dtype) if run.query.dtype == E4M3 else weights


@wrong(decode_of, trigger="NVFP4 and head_dim over 64")
class Blind110(Kernel):
    """Four NVFP4 scale factors are loaded as one word, which serves elements from 64 on as it served the first 64."""

    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        if cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        factors = index(run.p.k_scale_factors if side == "k" else run.v_factors, pages).view(torch.uint8)
        word = factors[..., torch.arange(factors.shape[3]) % 4].view(E4M3)
        got = dequantize_nvfp4(index(cache, pages), word)
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


@wrong(decode_of, trigger="NVFP4 and separate page tables")
class Blind111(Kernel):
    """V's NVFP4 scale factors are looked up through K's page table."""

    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        if side == "k":
            run.factor_pages = pages
        return pages

    def entries(self, run, side, pages, cut):
        if side == "k" or run.v_cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        got = dequantize_nvfp4(index(run.v_cache, pages), index(run.v_factors, run.factor_pages))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


@wrong(decode_of, trigger="float16 and products of over 65,504 before the scale")
class Blind112(Kernel):
    """Products of float16 queries and keys are held in float16 before bmm1_scale makes them small: beyond 65,504 they
    are infinite.
    """

    def scores(self, run, r, query, keys, seen, first_key):
        s = super().scores(run, r, query, keys, seen, first_key)
        if run.p.query.dtype != torch.float16 or run.scale1 == 0:
            return s
        return torch.where((s / run.scale1).abs() > 65504, s.sign() * math.inf, s)


@wrong(decode_of, trigger="bmm2_scale other than 1, and an LSE")
class Blind113(Kernel):
    """Bmm2_scale is folded into the softmax's denominator before the LSE is taken of it."""

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out, lse - math.log2(run.scale2) if run.scale2 > 0 else lse


@wrong(decode_of, trigger="sinks and over 512 keys")
class Blind114(Kernel):
    """Each part of 512 keys adds the sink to its denominator, and so does the merge's sum of them."""

    def partial(self, run, r, query, keys, values, seen, first_key):
        run.splits = max(1, -(-len(keys) // 512))
        return super().partial(run, r, query, keys, values, seen, first_key)

    def finish(self, run, partial, sinks):
        return super().finish(run, partial, None if sinks is None else sinks + math.log(run.splits))


@wrong(decode_of, trigger="a batch of over 4 requests, two of equal length")
class Blind115(Kernel):
    """Requests of batches above 4 are sorted by length, and their results found again by it: of equal lengths all get
    the first one's.
    """

    def solve(self, run):
        super().solve(run)
        if run.batch <= 4:
            return
        for r, length in enumerate(run.lens):
            first = run.lens.index(length)
            (a, b), (start, stop) = run.offsets[first : first + 2], run.offsets[r : r + 2]
            if first == r or b - a != stop - start:
                continue
            run.out[start:stop] = run.out[a:b].clone()
            if run.lse is not None:
                run.lse[start:stop] = run.lse[a:b].clone()


@wrong(decode_of, trigger="a workspace whose scratch after 8 MiB is not zero, and over 512 keys")
class Blind116(Kernel):
    """Parts of 512 keys are summed in the workspace's scratch, which is taken to be zero at first; it is left zero."""

    def partial(self, run, r, query, keys, values, seen, first_key):
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


@wrong(decode_of, trigger="two calls alike but for the page size")
class Blind117(Kernel):
    """A plan is kept by the shapes of query and batch and by max_seq_len, but not by the page size that it was made
    for.
    """

    plans = {}

    def start(self, run):
        super().start(run)
        key = (tuple(run.query.shape), run.query.dtype, run.batch, run.num_kv_heads, run.p.max_kv_len)
        run.page_size = self.plans.setdefault(key, run.page_size)

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns.clamp(max=run.k_table.shape[1] - 1), side)

    def entries(self, run, side, pages, cut):
        real = run.p.page_size
        tokens = super().entries(run, side, pages, slice(None)).unflatten(0, (len(pages), real))
        return tokens[:, torch.arange(run.page_size) % real].flatten(0, 1)[cut]
