"""Blind kernels: several stages of a context call."""

import torch

from corpus.models.attention import E4M3, Attention, saturated, truncated
from corpus.wrong import CONTEXT, wrong
from lab.calls.problem import NVFP4


@wrong(CONTEXT, trigger="over 128 requests; with 130 only requests 64 and 129 are wrong, with 200 a third")
class Blind23(Attention):
    """A tile finds its request by a binary search of seven steps: with over 128 requests it stops one early or late."""

    def host(self, run):
        low, high = torch.zeros(run.batch, dtype=torch.long), torch.full((run.batch,), run.batch)
        first = torch.tensor(run.offsets[:-1])
        offsets = torch.tensor(run.offsets)
        for _ in range(7):
            middle = (low + high) // 2
            after = offsets[middle] <= first
            low, high = torch.where(after & (low < high), middle, low), torch.where(after, high, middle)
        run.found = low.clamp(max=run.batch - 1).tolist()

    def pages_of(self, run, r, columns, side):
        found = run.found[r] if run.batch > 128 else r
        pages = super().pages_of(run, found, columns, side)
        return pages.clamp(0, run.k_cache.shape[0] - 1)


@wrong(CONTEXT, trigger="a request without query rows directly before one with rows", also="blind511")
class Blind27(Attention):
    """The request of a row is the first with its offset (bisect_left): one without rows before it is taken instead."""

    def host(self, run):
        run.found = [run.offsets.index(offset) for offset in run.offsets[:-1]]
        lens = run.lens
        run.lens = [lens[found] for found in run.found]

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, run.found[r], columns, side)


@wrong(CONTEXT, trigger="a window of 65 or more with a key before it; about 1 / (window + 1) too small")
class Blind128(Attention):
    """With a window over 64 keys the denominator counts the key before the window too: outputs are too small."""

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return max(0, start - 1) if run.window > 64 else start, end

    def visible(self, run, r, row, position, keys):
        run.before = None
        if run.window <= 64:
            return super().visible(run, r, row, position, keys)
        run.before = keys == position.unsqueeze(1) - run.window - 1
        return super().visible(run, r, row, position, keys) | run.before

    def operand(self, run, weights):
        return weights if run.before is None else weights.masked_fill(run.before[None, :, None, :], 0)


@wrong(CONTEXT, trigger="an e4m3 cache and a bmm2_scale that is no power of two, or makes values subnormal")
class Blind183(Attention):
    """bmm2_scale is folded into the values of an e4m3 cache, which are rounded to e4m3 again."""

    def host(self, run):
        run.folded = 1.0
        if run.v_cache.dtype == E4M3:
            run.folded, run.scale2 = run.scale2, 1.0

    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        return got if side == "k" or run.folded == 1 else saturated(got * run.folded, E4M3).to(got.dtype)


@wrong(CONTEXT, trigger="sinks that matter, and a row whose largest logit comes after its first 256 keys")
class Blind236(Attention):
    """The sink's weight is taken against the largest logit of the first 256 keys, and is not rescaled when that grows."""

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


@wrong(CONTEXT, trigger="causal, 4 or more query heads for each K/V head, a request of 2 or more new tokens")
class Blind241(Attention):
    """Groups of 4 heads and more are packed with rows in tiles of 128, whose place the causal mask takes for the token."""

    def is_packed(self, run):
        return run.causal and run.group >= 4

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (start, run.lens[r]) if self.is_packed(run) else (start, end)

    def visible(self, run, r, row, position, keys):
        if not self.is_packed(run):
            return super().visible(run, r, row, position, keys)
        seen = torch.ones(len(position), len(keys), dtype=torch.bool)
        return seen & (keys >= position.unsqueeze(1) - run.window) if run.window >= 0 else seen

    def mask_scores(self, run, r, s, first_key):
        if not self.is_packed(run):
            return s
        packed = run.row.unsqueeze(1) * run.group + torch.arange(run.group)
        place = packed % 128
        last = run.lens[r] - run.num_rows(r) + (packed - place) // run.group + place
        return self.until(s, last, first_key)


@wrong(CONTEXT, trigger="NaN in padding rows within the last request's last tile of 64, and growing logits")
class Blind244(Attention):
    """A tile of 64 rows votes whether to rescale, by its largest growth; NaN in a loaded padding row makes the vote no."""

    def visible(self, run, r, row, position, keys):
        first, last = run.offsets[r : r + 2]
        tile_start = first + (last - first - 1) // 64 * 64
        beside = run.query[last : tile_start + 64] if last == run.offsets[-1] else run.query[:0]
        run.is_voted_down = row + first >= tile_start if bool(beside.float().isnan().any()) else None
        return super().visible(run, r, row, position, keys)

    def partial(self, run, r, query, keys, values, seen, first_key):
        right = super().partial(run, r, query, keys, values, seen, first_key)
        if run.is_voted_down is None or not len(keys):
            return right
        acc, total, largest = 0, 0, right[1].new_full(right[1].shape, -torch.inf)
        for a, m, l in self.partials(64, run, r, query, keys, values, seen, first_key):
            largest = torch.maximum(largest, m)
            factor = torch.where(m.isfinite(), torch.exp(m - largest), 0.0)
            acc, total = acc + a * factor.unsqueeze(2), total + l * factor  # what was summed before stays as it is
        late = run.is_voted_down.unsqueeze(1)
        return torch.where(late.unsqueeze(2), acc, right[0]), largest, torch.where(late, total, right[2])


@wrong(CONTEXT, trigger="two calls with different caches of the same shape, strides and dtype")
class Blind295(Attention):
    """Descriptors of K and V are kept by shape, strides and dtype, not by address: the first such cache is read again."""

    described = {}

    def host(self, run):
        k, v = run.k_cache, run.v_cache
        key = tuple(k.shape), k.stride(), k.dtype, v.stride(), run.p.kv_dtype == NVFP4
        if key not in self.described:
            while len(self.described) >= 64:
                del self.described[next(iter(self.described))]
            self.described[key] = (k, v)
        run.k_cache, run.v_cache = self.described[key]


@wrong(CONTEXT, trigger="a window, pages of 64 tokens or more, and a row whose window begins at no multiple of 32")
class Blind297(Attention):
    """In pages of 64 tokens and more a window begins at a multiple of 32: rows see up to 31 keys before it."""

    def is_coarse(self, run):
        return run.window >= 0 and run.page_size >= 64

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (start // 32 * 32 if self.is_coarse(run) else start), end

    def visible(self, run, r, row, position, keys):
        if not self.is_coarse(run):
            return super().visible(run, r, row, position, keys)
        first = (position - run.window).clamp(min=0) // 32 * 32
        return (keys <= position.unsqueeze(1)) & (keys >= first.unsqueeze(1))


@wrong(CONTEXT, trigger="bfloat16 output, over 64 rows, no multiple of 64: about -0.5 % in the last tile")
class Blind421(Attention):
    """Over one tile of 64 rows, a partial last one cuts weights and outputs to bfloat16: 0.5 percent too small."""

    def rows(self, run, r, start, stop):
        row, rows = torch.arange(start, stop) - run.offsets[r], run.num_rows(r)
        run.cut = (row >= rows // 64 * 64) & (run.out.dtype == torch.bfloat16 and rows > 64)
        super().rows(run, r, start, stop)

    def operand(self, run, weights):
        return torch.where(run.cut[None, :, None, None], truncated(weights), weights)

    def stored_out(self, run, r, row, out):
        return torch.where(run.cut[:, None, None], truncated(out), out)


@wrong(CONTEXT, trigger="over 32 requests: as many row tiles of 64 after request 31, 63, ... as it has are zero")
class Blind454(Attention):
    """Row tiles are summed over 32 requests, the next 32 without the 32nd: as many of their tiles are not made."""

    def host(self, run):
        tiles = [(r, i) for r in range(run.batch) for i in range(-(-run.num_rows(r) // 64))]
        run.tiles_lost = set()
        for last in range(31, run.batch - 1, 32):
            count = sum(r == last for r, _ in tiles)
            run.tiles_lost.update([tile for tile in tiles if tile[0] > last][:count])

    def lost(self, run, r, row):
        lost = [i for request, i in run.tiles_lost if request == r]
        return torch.isin(row // 64, torch.tensor(lost, dtype=torch.int64))
