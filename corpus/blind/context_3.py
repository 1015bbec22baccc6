"""Wrong kernels of the context call, written without a look at the checks: numbers 176 to 239."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, context_of, index, saturated
from lab.references.quantization import deinterleave_v_scale_factors, dequantize_nvfp4


@wrong(context_of, trigger="NVFP4 with head_dim over 16")
class Blind176(Kernel):
    """K's NVFP4 scale factors are read as V's are, interleaved over four tokens, although K's are in plain order."""

    def entries(self, run, side, pages, cut):
        if side == "v" or run.k_cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        factors = index(run.p.k_scale_factors, pages).view(torch.uint8)
        got = dequantize_nvfp4(index(run.k_cache, pages), deinterleave_v_scale_factors(factors).view(E4M3))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


@wrong(context_of, trigger="a cached prefix whose length is a multiple of the page size, as prefix caches leave it")
class Blind177(Kernel):
    """A cached prefix and the new tokens are two passes; the second begins with the page of the prefix's last token,
    which the first has done if the page is full: its keys count twice.
    """

    def mask_scores(self, run, r, s, first_key):
        prefix = run.lens[r] - (run.offsets[r + 1] - run.offsets[r])
        if prefix <= 0 or prefix % run.page_size:
            return s
        keys = first_key + torch.arange(s.shape[3])
        twice = (keys >= prefix - run.page_size) & (keys < prefix)
        return s + math.log(2.0) * twice


@wrong(
    context_of,
    trigger=(
        "a row with a key whose logit is 6 above all of a later tile of 64 keys that together matter, such as an "
        "attention sink at the first token and some hundred keys after it"
    ),
)
class Blind178(Kernel):
    """A tile of 64 keys is skipped where its largest logit is more than 6 below the largest of the tiles before it, as
    if a threshold for skipping had been asked for.
    """

    def mask_scores(self, run, r, s, first_key):
        largest, tiles = None, []
        for tile in s.split(64, 3):
            own = tile.amax(3, keepdim=True)
            if largest is not None:
                tile = tile.masked_fill(own < largest - 6.0, -math.inf)
            largest = own if largest is None else torch.maximum(largest, own)
            tiles.append(tile)
        return torch.cat(tiles, 3) if tiles else s


@wrong(context_of, trigger="a visible logit more than 88 below the row's largest")
class Blind179(Kernel):
    """The exponentials of every fourth key are computed on the FMA units, a power of 2 added to the exponent field of
    a polynomial; that is not clamped, and below 2**-127 it wraps around into the sign.
    """

    def denominator(self, run, s, weights, largest):
        """Return the sum of the weights, whose every fourth is computed anew, in place."""
        if weights.dtype == torch.float32:
            logits = s[..., ::4]
            x = (logits - torch.where(largest.isfinite(), largest, 0.0).unsqueeze(3)) / math.log(2.0)
            whole = torch.where(x.isfinite(), x.floor(), 0.0)
            bits = torch.exp2(x - whole).clamp(1.0, 2.0 - 2.0**-23).view(torch.int32).long() + (whole.long() << 23)
            bits = (bits + 2**31) % 2**32 - 2**31
            weights[..., ::4] = torch.where(logits.isfinite(), bits.int().view(torch.float32), 0.0)
        return weights.sum(3)


@wrong(
    context_of,
    trigger=("kv_cache as one tensor [num_pages, 2, ...] with kv_layout='NHD' and pages of over 1 token"),
)
class Blind180(Kernel):
    """An NHD cache that is one tensor is taken for [num_pages, page_size, 2, num_kv_heads, head_dim], with K and V of
    a token side by side.
    """

    def start(self, run):
        super().start(run)
        cache = run.call.kv_cache
        if isinstance(cache, torch.Tensor) and run.call.kv_layout == "NHD" and cache.shape[1] == 2:
            pages, _, page_size, heads, dim = cache.shape
            both = cache.reshape(pages, page_size, 2, heads, dim)
            run.k_cache, run.v_cache = (both[:, :, i].transpose(1, 2) for i in (0, 1))


@wrong(
    context_of,
    trigger=("a request with as many rows as keys, of more than one page, whose page ids are not consecutive"),
)
class Blind181(Kernel):
    """A request without cached keys goes down a path that takes its pages to follow its first one in the pool."""

    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        is_new = run.offsets[r + 1] - run.offsets[r] == run.lens[r]
        if not is_new:
            return pages
        table = run.k_table if side == "k" else run.v_table
        return (table[r, 0].long() + columns).clamp(max=run.k_cache.shape[0] - 1)


@wrong(
    context_of,
    trigger=(
        "max_q_len <= window_left < max_kv_len, and a row with a key before its window (a chunk of a longer prompt)"
    ),
)
class Blind182(Kernel):
    """A window of at least max_q_len, not of max_kv_len, is taken for none."""

    def start(self, run):
        super().start(run)
        if run.window >= run.p.max_q_len:
            run.window = -1


@wrong(
    context_of,
    trigger=("an e4m3 cache and a bmm2_scale that is no power of two, or so small that values become subnormal"),
)
class Blind183(Kernel):
    """Bmm2_scale is folded into the values of an e4m3 cache, which are rounded to e4m3 again."""

    def start(self, run):
        super().start(run)
        run.folded = 1.0
        if run.v_cache.dtype == E4M3:
            run.folded, run.scale2 = run.scale2, 1.0

    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        return got if side == "k" or run.folded == 1 else saturated(got * run.folded, E4M3).to(got.dtype)


@wrong(context_of, trigger="an LSE and a bfloat16 query; of a float16 one an LSE beyond 16")
class Blind184(Kernel):
    """The LSE goes through the query's 16 bits before it is stored as float32."""

    def store(self, run, r, start, stop, out, lse):
        if run.query.dtype in (torch.float16, torch.bfloat16):
            lse = lse.to(run.query.dtype)
        super().store(run, r, start, stop, out, lse)


@wrong(
    context_of,
    trigger=("an e4m3 query, and a key after the first 128 whose logit is above all before it by 6.1 to 8.3 (base e)"),
)
class Blind185(Kernel):
    """Sums are rescaled only where the largest logit grows by over 12 bits; for an e4m3 query, weights that have grown
    beyond 448 since saturate.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        if run.query.dtype != E4M3:
            return super().partial(run, r, query, keys, values, seen, first_key)
        s = self.scores(run, r, query, keys, seen, first_key)
        if s.shape[3] == 0:
            return super().partial(run, r, query, keys, values, seen, first_key)
        h, rows, g, _ = s.shape
        origin, total = s.new_full((h, rows, g), -math.inf), s.new_zeros(h, rows, g)
        acc = s.new_zeros(h, rows, g, values.shape[2])
        for tile, side in zip(s.split(128, 3), values.split(128)):
            most = tile.amax(3)
            new = torch.where(most > origin + 12 * math.log(2.0), most, origin)
            safe = torch.where(new.isfinite(), new, 0.0)
            factor = torch.where(origin.isfinite(), torch.exp(origin - safe), 0.0)
            weights = torch.exp(tile - safe.unsqueeze(3))
            total = total * factor + weights.sum(3)
            sums = (weights.clamp(max=448.0).flatten(1, 2) @ side.transpose(0, 1)).unflatten(1, (rows, g))
            acc, origin = acc * factor.unsqueeze(3) + sums, new
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, origin, total))


@wrong(context_of, trigger="causal, a request of over 256 new tokens")
class Blind234(Kernel):
    """Rows of a request go in launches of 256, each of which takes its last row for the request's newest token."""

    def positions(self, run, r, row):
        num_rows = run.offsets[r + 1] - run.offsets[r]
        end = (row // 256 * 256 + 256).clamp(max=num_rows)
        return run.lens[r] - end + row


@wrong(context_of, trigger="an e4m3 cache and a query of 16 bits")
class Blind235(Kernel):
    """V of an e4m3 cache is widened to 16 bits two elements at a time, which come out in the other order."""

    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        if side == "v" and run.v_cache.dtype == E4M3 != run.p.query.dtype and got.shape[-1] % 2 == 0:
            got = got.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return got


@wrong(
    context_of,
    trigger=("sinks, and a row whose largest logit comes after its first tile of 256 keys (a sink that matters)"),
)
class Blind236(Kernel):
    """The sink's weight is taken against the largest logit of the first tile of 256 keys, and is not rescaled when
    that grows.
    """

    def finish(self, run, partial, sinks):
        acc, largest, total = partial
        if sinks is None or run.first_largest is None:
            return super().finish(run, partial, sinks)
        first = torch.where(run.first_largest.isfinite(), run.first_largest, largest)
        return super().finish(run, partial, sinks + torch.where(largest.isfinite(), largest - first, 0.0))

    def mask_scores(self, run, r, s, first_key):
        n = 256 - first_key % 256
        first = s[..., :n].amax(3) if s.shape[3] else None
        run.first_largest = None if first is None else first.transpose(0, 1).flatten(1, 2)
        return s


@wrong(context_of, trigger="causal=False, a length that is no multiple of the page size")
class Blind237(Kernel):
    """With causal=False nothing masks the end of a request: the last page's tokens after it are seen."""

    def span(self, run, r, position):
        a, b = super().span(run, r, position)
        return a, b if run.causal else -(-b // run.page_size) * run.page_size


@wrong(
    context_of,
    trigger=(
        "a group that does not divide 128 (5, 6, 7, 12), and a request with more rows than ceil(rows * group / "
        "128) * (128 // group): 200 rows with a group of 7, 51 with a group of 5"
    ),
)
class Blind238(Kernel):
    """A tile has 128 // group rows with all heads of a group; there are as many tiles as rows * group / 128. Rows
    after the last tile are zero.
    """

    def request(self, run, r):
        super().request(run, r)
        first, last = run.offsets[r : r + 2]
        tiles = -(-(last - first) * run.group // 128)
        end = first + tiles * max(128 // run.group, 1)
        if end < last:
            run.out[end:last] = 0
            if run.lse is not None:
                run.lse[end:last] = -math.inf


@wrong(context_of, trigger="NVFP4 with kv_cache_sf as one tensor [num_pages, 2, ...]")
class Blind239(Kernel):
    """Of scale factors that are one tensor, V's are taken from its first part, K's."""

    def start(self, run):
        super().start(run)
        if isinstance(run.call.kv_cache_sf, torch.Tensor):
            run.v_factors = run.p.k_scale_factors
            if run.p.v_scale_factors_interleaved:
                run.v_factors = deinterleave_v_scale_factors(run.v_factors.view(torch.uint8)).view(E4M3)
