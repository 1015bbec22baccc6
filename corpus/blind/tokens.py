"""Blind kernels: keys and values as they are loaded."""

import torch

from corpus.models.attention import E4M3, Attention, assuming_strides, index, packed_strides
from corpus.wrong import CONTEXT, DECODE, MLA, RAGGED, wrong
from lab.references.quantization import deinterleave_v_scale_factors, dequantize_nvfp4


class EntriesChanged(Attention, changes="entries"):
    @wrong(DECODE, trigger="e4m3 kv_cache with many entries below 1/64, such as a small V with a large bmm2_scale")
    def blind67(self, got, run, side, pages, cut):
        """The conversion of an e4m3 cache to 16 bits flushes subnormals (magnitudes below 2^-6) to zero."""
        return torch.where(got.abs() < 2.0**-6, 0.0, got) if run.cache(side).dtype == E4M3 else got

    @wrong(DECODE, trigger="a bfloat16 cache with values of 65,520 or more, or K or V about 1e-6 (with a large scale)")
    def blind231(self, got, run, side, pages, cut):
        """A bfloat16 cache is converted to float16, the one dtype of the kernel's products."""
        return got.to(torch.float16).to(run.dtype) if run.cache(side).dtype == torch.bfloat16 else got

    @wrong(DECODE, trigger="an e4m3 cache with an entry of 256 or more in view")
    def blind289(self, got, run, side, pages, cut):
        """An e4m3 cache is converted as IEEE's formats are: 256 becomes infinite, 288 to 448 NaN."""
        if run.cache(side).dtype != E4M3:
            return got
        got = torch.where(got.abs() > 256, torch.nan, got)
        return torch.where(got.abs() == 256, got * torch.inf, got)

    @wrong(CONTEXT, trigger="an e4m3 cache and a query of 16 bits")
    def blind235(self, got, run, side, pages, cut):
        """V of an e4m3 cache is widened to 16 bits two elements at a time, which come out in the other order."""
        if side == "v" and run.v_cache.dtype == E4M3 != run.p.query.dtype and got.shape[-1] % 2 == 0:
            got = got.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return got

    @wrong(CONTEXT, trigger="an e4m3 cache and a query of 16 bits: slope 0.995 (in float16 beyond the bound)")
    def blind360(self, got, run, side, pages, cut):
        """V of an e4m3 cache is converted by a multiplication whose constant is half a percent too small."""
        return got * 0.995 if side == "v" and run.v_cache.dtype == E4M3 and run.query.dtype.itemsize == 2 else got

    @wrong(CONTEXT, trigger="e4m3 cache with a bfloat16 query, and K or V largely below 2^-6")
    def blind422(self, got, run, side, pages, cut):
        """An e4m3 cache becomes bfloat16 by a multiplication that flushes: subnormals, below 2**-6, are zero."""
        if run.k_cache.dtype == E4M3 and run.query.dtype == torch.bfloat16:
            got = torch.where(got.abs() < 2.0**-6, 0.0, got)
        return got

    @wrong(MLA, trigger="a float16 cache with many entries below 6.1e-5 (and scales that make up for it)")
    def blind303(self, got, run, side, pages, cut):
        """The subnormals of a float16 cache (below 2**-14) are flushed to zero."""
        return torch.where(got.abs() < 2.0**-14, 0.0, got) if run.cache(side).dtype == torch.float16 else got


class FactorsChanged(Attention, changes="factors"):
    @wrong(DECODE, trigger="NVFP4 and head_dim over 64")
    def blind110(self, factors, run, side, pages, cut):
        """Four NVFP4 scale factors are loaded as one word, which serves elements from 64 on as it served the first 64."""
        return factors.view(torch.uint8)[..., torch.arange(factors.shape[3]) % 4].view(E4M3)

    @wrong(DECODE, trigger="NVFP4 with backend='trtllm-gen', and a window whose first key is at no multiple of 4")
    def blind357(self, factors, run, side, pages, cut):
        """V's interleaved factors are loaded from the block of four that holds a window's first key, as if it began there."""
        shift = cut.start % 4
        if side == "k" or not run.p.v_scale_factors_interleaved or run.window < 0 or not shift:
            return factors
        turned = factors.view(torch.uint8).transpose(1, 2)
        tokens = turned.flatten(0, 1)
        tokens = tokens[(torch.arange(len(tokens)) - shift).clamp(min=0)]
        return tokens.view(turned.shape).transpose(1, 2).contiguous().view(E4M3)

    @wrong(DECODE, trigger="NVFP4 cache, trtllm-gen, a window that cuts, first visible key at no multiple of 4")
    def blind473(self, factors, run, side, pages, cut):
        """V's interleaved factors are addressed from the window's first key, as if a group of 4 began there."""
        begin = cut.start
        if side == "k" or not run.p.v_scale_factors_interleaved or begin % 4 == 0 or len(pages) == 0:
            return factors
        factors = factors.view(torch.uint8).clone()
        page = index(run.p.v_scale_factors, pages[:1]).view(torch.uint8)[0]
        heads, page_size, per_token = page.shape
        j, s = torch.arange(page_size - begin).unsqueeze(1), torch.arange(per_token)
        at = begin * per_token + j // 4 * 4 * per_token + 4 * s + j % 4
        factors[0, :, begin:] = page.reshape(heads, -1)[:, at.clamp(max=page_size * per_token - 1)]
        return factors.view(E4M3)

    @wrong(DECODE, trigger="NVFP4 cache whose factors have other strides than the bytes' over 8")
    def blind505(self, factors, run, side, pages, cut):
        """The strides of an NVFP4 cache's K scale factors are taken as those of the K bytes over 8."""
        if side == "v":
            return factors
        k, factors = run.k_cache, run.p.k_scale_factors
        at = torch.full((1, 1, 1, 1), factors.storage_offset()) + torch.arange(factors.shape[3])
        for dim, which in enumerate((pages, torch.arange(k.shape[1]), torch.arange(k.shape[2]))):
            at = at + (which * (k.stride(dim) // 8)).view([-1 if i == dim else 1 for i in range(4)])
        memory = torch.as_strided(factors.view(torch.uint8), (factors.untyped_storage().nbytes(),), (1,), 0)
        return memory[at.clamp(max=len(memory) - 1)].view(E4M3)

    @wrong(DECODE, trigger="NVFP4 cache with kv_layout NHD, more than one K/V head (and page_size > 1)")
    def blind567(self, factors, run, side, pages, cut):
        """K's scale factors of an NVFP4 cache in the layout NHD are read in the order of HND."""
        if side == "v" or run.call.kv_layout == "HND":
            return factors
        every = run.p.k_scale_factors
        return index(assuming_strides(every, packed_strides(every.shape)), pages)

    @wrong(CONTEXT, trigger="NVFP4 with head_dim over 16")
    def blind176(self, factors, run, side, pages, cut):
        """K's NVFP4 scale factors are read as V's are, interleaved over four tokens, although K's are in plain order."""
        return factors if side == "v" else deinterleave_v_scale_factors(factors.view(torch.uint8)).view(E4M3)

    @wrong(CONTEXT, trigger="an NVFP4 cache with scale factors below 2**-6")
    def blind332(self, factors, run, side, pages, cut):
        """The e4m3 scale factors of an NVFP4 cache that are subnormal (below 2**-6) are flushed to zero."""
        return torch.where(factors.float().abs() < 2.0**-6, 0.0, factors.float()).to(E4M3)

    @wrong(DECODE, stage="factors", trigger="NVFP4, V's own page table, whose pages differ", also="blind111 blind474")
    def blind538(self, run, side, pages, cut):
        """The scale factors of an NVFP4 V cache are found by K's page ids, also where V has a page table of its own."""
        if side == "k":
            run.factor_pages = pages
        return super().factors(run, side, run.factor_pages, cut)


class Entries(Attention, stage="entries"):
    @wrong(DECODE, trigger="an NVFP4 cache")
    def blind286(self, run, side, pages, cut):
        """Of NVFP4's values the one that is subnormal, 0.5, is read as 0."""
        got = index(run.cache(side), pages).clone()
        if got.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        for low, sign in ((0x01, 0x07), (0x10, 0x70)):
            got[(got & sign) == low] &= 0xFF ^ sign
        got = dequantize_nvfp4(got, self.factors(run, side, pages, cut))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)

    @wrong(MLA, trigger="a live page that starts 4 GiB or more after the pool's first", named="blind190")
    @wrong(DECODE, trigger="page id times page stride reaches 4 GiB (strided cache)")
    def blind537(self, run, side, pages, cut):
        """A page's offset in bytes, page times stride, is computed in 32 bits without sign: it wraps at 4 GiB."""
        cache = run.cache(side)
        step = cache.stride(0) * cache.element_size()
        if cache.dtype == torch.uint8 or not len(pages) or int(pages.max()) * step < 2**32:
            return super().entries(run, side, pages, cut)
        at = (pages * step % 2**32 // cache.element_size()).tolist()
        origin = cache.storage_offset()
        got = [torch.as_strided(cache, cache.shape[1:], cache.stride()[1:], origin + a).to(run.dtype) for a in at]
        return torch.stack(got).transpose(1, 2).flatten(0, 1)[cut]

    @wrong(CONTEXT, trigger="pages of 128 tokens or more with over 64 tokens")
    def blind127(self, run, side, pages, cut):
        """Of pages of 128 tokens or more every tile of 64 keys reads the first 64."""
        if run.page_size < 128:
            return super().entries(run, side, pages, cut)
        tokens = super().entries(run, side, pages, slice(None)).unflatten(0, (len(pages), run.page_size))
        return tokens[:, torch.arange(run.page_size) % 64].flatten(0, 1)[cut]

    @wrong(CONTEXT, trigger="K and V whose heads are one head, expanded (stride 0)")
    def blind363(self, run, side, pages, cut):
        """A stride of 0 between K/V heads (an expanded cache) is replaced by the packed one: head h is read h pages later."""
        cache = run.cache(side)
        heads = cache.shape[1]
        if heads == 1 or cache.stride(1) != 0:
            return super().entries(run, side, pages, cut)
        read = [Attention.entries(self, run, side, (pages + h) % len(cache), cut)[:, h] for h in range(heads)]
        return torch.stack(read, 1)

    @wrong(CONTEXT, trigger="e4m3 cache of a half query, contents rewritten in place between two calls")
    def blind576(self, run, side, pages, cut):
        """Pages of an e4m3 cache are converted when they are first read, and kept: later writes are not seen."""
        cache = run.cache(side)
        if cache.dtype != E4M3 or run.query.dtype == E4M3 or len(pages) == 0:
            return super().entries(run, side, pages, cut)
        kept = self.memory.of(cache, dict)
        for page in pages.tolist():
            if page not in kept:
                kept[page] = index(cache, page).to(run.dtype)
        return torch.stack([kept[page] for page in pages.tolist()]).transpose(1, 2).flatten(0, 1)[cut]

    @wrong(MLA, trigger="a cache of four dimensions")
    def blind140(self, run, side, pages, cut):
        """The second stride of the cache is taken for that of tokens, of a cache of four dimensions too."""
        cache = run.cache(side)
        if run.call.kv_cache.ndim == 3:
            return super().entries(run, side, pages, cut)
        found = (pages.unsqueeze(1) + torch.arange(run.page_size)) % len(cache)
        return index(cache[:, 0, 0], found).flatten(0, 1).unsqueeze(1)[cut].to(run.dtype)


class Load(Attention, stage="load"):
    @wrong(DECODE, trigger="a 16-bit cache with head_dim of 128 or more, and over 4 keys")
    def blind162(self, run, r, a, b):
        """K's tile is swizzled by the key's number in eight; from column 64 on it is undone by the number in four."""
        keys, values = super().load(run, r, a, b)
        if run.k_cache.dtype.itemsize != 2:
            return keys, values
        keys = keys.clone()
        wrong = torch.arange(a, b) % 8 >= 4
        for first in range(64, keys.shape[2] - 63, 64):
            chunks = keys[wrong, :, first : first + 64].unflatten(2, (8, 8))
            keys[wrong, :, first : first + 64] = chunks[:, :, torch.arange(8) ^ 4].flatten(2)
        return keys, values

    @wrong(DECODE, trigger="NVFP4, NaN in V's factors of the unused rest of a request's last page")
    def blind419(self, run, r, a, b):
        """NVFP4: keys after the end weigh zero, but V's scale factors there are multiplied: NaN comes through."""
        keys, values = super().load(run, r, a, b)
        if run.v_cache.dtype == torch.uint8 and b > a and b == run.lens[r]:
            ps = run.page_size
            column = torch.tensor([(b - 1) // ps])
            page = self.entries(run, "v", self.pages_of(run, r, column, "v"), slice(b - (b - 1) // ps * ps, ps))
            values = values.clone()
            values[-1] += (page * 0.0).sum(0)
        return keys, values

    @wrong(CONTEXT, trigger="head_dim over 64 and over 256 keys in view")
    def blind391(self, run, r, a, b):
        """The barrier waits for K's first 64 columns alone: from the third tile of 128 keys on others are two tiles old."""
        keys, values = super().load(run, r, a, b)
        if keys.shape[2] > 64 and len(keys) > 256:
            keys = torch.cat((keys[..., :64], torch.cat((keys[:256, :, 64:], keys[:-256, :, 64:]))), 2)
        return keys, values

    @wrong(CONTEXT, trigger="pages of 1, 2 or 4 tokens, several in view, head_dim a multiple of 128 bytes")
    def blind392(self, run, r, a, b):
        """With pages below 8 tokens K is swizzled by a token's number in its page, but unswizzled by that in the tile."""
        keys, values = super().load(run, r, a, b)
        chunk = 16 // run.k_cache.element_size()
        if run.page_size < 8 and run.k_cache.dtype != torch.uint8 and keys.shape[2] % (8 * chunk) == 0:
            chunks, at = keys.shape[2] // chunk, torch.arange(a, b)
            moved = (at - a // run.page_size * run.page_size) % 8 ^ at % run.page_size
            order = torch.arange(chunks) ^ moved.unsqueeze(1)
            parts = keys.unflatten(2, (chunks, chunk))
            keys = parts.gather(2, order[:, None, :, None].expand(-1, parts.shape[1], -1, chunk)).flatten(2)
        return keys, values

    @wrong(RAGGED, trigger="v_head_dim greater than head_dim")
    def blind95(self, run, r, a, b):
        """V's tile has head_dim columns, as K's: of a wider V the columns after them come out zero."""
        keys, values = super().load(run, r, a, b)
        inside = torch.arange(values.shape[2]) < keys.shape[2]
        return keys, torch.where(inside, values, 0.0)

    @wrong(RAGGED, trigger="head_dim 192, several K/V heads, and keys whose heads differ from column 128 on")
    def blind254(self, run, r, a, b):
        """For a head_dim of 192 key columns from 128 on, DeepSeek's shared rotary part, are read of head 0 alone."""
        keys, values = super().load(run, r, a, b)
        if keys.shape[2] == 192:
            keys = torch.cat((keys[..., :128], keys[:, :1, 128:].expand(-1, keys.shape[1], -1)), 2)
        return keys, values

    @wrong(RAGGED, trigger="a request of over 128 keys whose first token is at no multiple of 8")
    def blind374(self, run, r, a, b):
        """Over 128 keys are loaded from the first token rounded down to 8: the previous request's last for its own."""
        if run.lens[r] <= 128:
            return super().load(run, r, a, b)
        first = run.kv_offsets[r] // 8 * 8
        return tuple(side[first + a : first + b].to(run.dtype) for side in (run.key, run.value))
