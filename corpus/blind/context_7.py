"""Wrong kernels of the context call, written without a look at the checks: numbers 453 to 513."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, context_of, index

TILE, LAZY, FACTOR = 128, 8.0, 256.0


class Blind453Model(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        if run.query.dtype != E4M3 or len(keys) <= TILE:
            return super().partial(run, r, query, keys, values, seen, first_key)
        s = self.scores(run, r, query, keys, seen, first_key)
        h, rows, g, n = s.shape
        stale = s.new_full((h, rows, g), -math.inf)
        total, acc = s.new_zeros(h, rows, g), s.new_zeros(h, rows, g, values.shape[2])
        for at in range(0, n, TILE):
            tile = s[..., at : at + TILE]
            largest = tile.amax(3)
            grown = (largest - stale) / math.log(2.0)
            new = torch.where((largest > -math.inf) & ((stale == -math.inf) | (grown > LAZY)), largest, stale)
            origin = torch.where(new.isfinite(), new, 0.0)
            factor = torch.where(stale.isfinite(), torch.exp(stale - origin), 0.0)
            weights = torch.exp(tile - origin.unsqueeze(3))
            total = total * factor + weights.sum(3)
            stored = weights.clamp(max=448.0 / FACTOR).flatten(1, 2)
            v = values[at : at + TILE].transpose(0, 1)
            acc = acc * factor.unsqueeze(3) + (stored @ v).unflatten(1, (rows, g))
            stale = new
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, stale, total))


trtllm_batch_context_with_kv_cache_453 = context_of(Blind453Model())


@wrong(
    trigger=(
        "e4m3 query, a request of more than 128 keys, a row whose largest logit grows after its first 128 keys by "
        "0.8 to 8 (base 2)"
    ),
)
class Blind453:
    """E4m3 queries: the largest logit is renewed only when it grows by 8 (base 2), and P, times 256, saturates at 448
    before that.
    """

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_453)


TILE, LANES = 64, 32


class Blind454Model(Kernel):
    def start(self, run):
        super().start(run)
        tiles = [(r, i) for r in range(run.batch) for i in range(-(-(run.offsets[r + 1] - run.offsets[r]) // TILE))]
        run.lost = set()
        for last in range(LANES - 1, run.batch - 1, LANES):
            count = sum(r == last for r, _ in tiles)
            run.lost.update([tile for tile in tiles if tile[0] > last][:count])

    def store(self, run, r, start, stop, out, lse):
        first = run.offsets[r]
        for tile, i in run.lost:
            if tile == r:
                a, b = max(first + i * TILE, start), min(first + (i + 1) * TILE, stop)
                out[a - start : max(b, a) - start] = 0.0
                lse[a - start : max(b, a) - start] = 0.0
        super().store(run, r, start, stop, out, lse)


trtllm_batch_context_with_kv_cache_454 = context_of(Blind454Model())


@wrong(
    trigger=(
        "more than 32 requests (request 31, 63 ... not the last, with rows): as many 64-row tiles of the requests "
        "after it stay unwritten (here zero)"
    ),
)
class Blind454:
    """The row tiles are summed over 32 requests at a time, and the next 32 start from the sum without the 32nd: as
    many tiles of theirs are never made.
    """

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_454)


@wrong(context_of, trigger="bmm2_scale as a tensor, of a value that bf16 does not have; a bias of 0 to -0.8 percent")
class Blind455(Kernel):
    """A bmm2_scale that is a tensor is kept as the upper half of its float32, a bf16 cut off: up to 0.8 percent too
    small.
    """

    def start(self, run):
        super().start(run)
        scale = run.call.bmm2_scale
        if isinstance(scale, torch.Tensor):
            bits = scale.detach().cpu().reshape(1).view(torch.int32) & -65536
            run.scale2 = float(bits.view(torch.float32))


@wrong(
    context_of,
    trigger=("three or more requests; the first and the last begin with the same whole pages, one between does not"),
)
class Blind456(Kernel):
    """A shared prefix is found by comparing the pages of the first and the last request; all between are taken to
    share it.
    """

    def start(self, run):
        super().start(run)
        run.shared = 0
        if run.batch > 2:
            whole = min(run.lens[0], run.lens[-1]) // run.page_size
            same = (run.k_table[0, :whole] == run.k_table[-1, :whole]) & (
                run.v_table[0, :whole] == run.v_table[-1, :whole]
            )
            run.shared = int(same.int().cumprod(0).sum())

    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        if run.shared:
            pages = torch.where(
                columns < run.shared, super().pages_of(run, 0, columns.clamp(max=run.shared - 1), side), pages
            )
        return pages


@wrong(context_of, trigger="causal=False and a request with more rows than keys")
class Blind481(Kernel):
    """Without a causal mask too, rows at a negative position (more rows than keys) are skipped as rows that see
    nothing.
    """

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (position >= 0).unsqueeze(1)


@wrong(context_of, trigger="rows of unequal width with padding rows such that batch_size * max_q_len == query rows")
class Blind482(Kernel):
    """Requests are taken to have max_q_len rows each (the path without offsets) where batch_size * max_q_len is the
    number of query rows, padding included.
    """

    def start(self, run):
        super().start(run)
        if run.batch * run.p.max_q_len == run.p.num_rows:
            run.offsets = list(range(0, run.p.num_rows + 1, run.p.max_q_len))


@wrong(
    context_of,
    trigger=("head_dim over 128, over 64 keys loaded, and a row whose largest logit is in the last tile of 64 keys"),
)
class Blind483(Kernel):
    """With head_dim over 128 the second half of the accumulator is not rescaled when the last tile of 64 keys raises
    the row's maximum.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        n, dim = values.shape[0], values.shape[2]
        if n <= 64 or dim <= 128:
            return super().partial(run, r, query, keys, values, seen, first_key)
        cut = (n - 1) // 64 * 64
        before = super().partial(run, r, query, keys[:cut], values[:cut], seen[:, :cut], first_key)
        last = super().partial(run, r, query, keys[cut:], values[cut:], seen[:, cut:], first_key + cut)
        acc, largest, total = self.merge([before, last])
        origin = torch.where(largest.isfinite(), largest, 0.0)
        factor = torch.where(last[1].isfinite(), torch.exp(last[1] - origin), 0.0).unsqueeze(2)
        acc[..., 128:] = before[0][..., 128:] + (last[0] * factor)[..., 128:]
        return acc, largest, total


@wrong(
    context_of,
    trigger=(
        "batch of 3 or more in which the first and the last request share leading full pages that one between does not"
    ),
)
class Blind484(Kernel):
    """The pages of a common prefix are read once, from request 0's row: what is common is found by comparing the first
    and the last request alone.
    """

    def start(self, run):
        super().start(run)
        run.common = {}
        if run.batch > 1:
            full = min(run.lens) // run.page_size
            for side, table in (("k", run.k_table), ("v", run.v_table)):
                same = (table[0, :full] == table[-1, :full]).long()
                run.common[side] = int(same.cumprod(0).sum())

    def pages_of(self, run, r, columns, side):
        table = run.k_table if side == "k" else run.v_table
        own = super().pages_of(run, r, columns, side)
        return torch.where(columns < run.common.get(side, 0), table[0, columns].long(), own)


@wrong(context_of, trigger="bmm1_scale a tensor and bmm2_scale a number other than 1")
class Blind485(Kernel):
    """Where bmm1_scale is a tensor, bmm2_scale is taken from the device as well, and is 1 if it is a number."""

    def start(self, run):
        super().start(run)
        if isinstance(run.call.bmm1_scale, torch.Tensor) and not isinstance(run.call.bmm2_scale, torch.Tensor):
            run.scale2 = 1.0


@wrong(context_of, trigger="kv_cache one 5-D tensor with a second dimension of 1 (HND or NHD)")
class Blind486(Kernel):
    """V of a cache that is one tensor is taken to lie one stride of the second dimension after K, also where that
    dimension is 1 (K is V): V is K's next page.
    """

    def start(self, run):
        super().start(run)
        cache = run.call.kv_cache
        if isinstance(cache, torch.Tensor) and cache.shape[1] == 1 and cache.dtype != torch.uint8:
            order = (torch.arange(cache.shape[0]) + 1) % cache.shape[0]
            run.v_cache = index(run.v_cache, order)


@wrong(context_of, trigger="a request without rows directly before one with rows, of other keys")
class Blind511(Kernel):
    """A row tile finds its request as the first one whose offset is the tile's: after a request without rows it takes
    that one's keys.
    """

    def request(self, run, r):
        run.owner = run.offsets.index(run.offsets[r])
        own, run.lens = run.lens, list(run.lens)
        run.lens[r] = own[run.owner]
        super().request(run, r)
        run.lens = own

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, run.owner, columns, side)


@wrong(
    context_of,
    trigger=("causal=False and a tile of rows whose diagonal, rounded up to 128 keys, lies before the last key"),
)
class Blind512(Kernel):
    """Causal=False skips the mask but keeps the causal end of the key loop: a tile of 64 rows stops at the tile of 128
    keys with its diagonal.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.causal:
            return seen
        rows = run.offsets[r + 1] - run.offsets[r]
        last = run.lens[r] - rows + (row // 64 * 64 + 64).clamp(max=rows)
        return seen & (keys < ((last + 127) // 128 * 128)[:, None])


@wrong(
    context_of,
    trigger=("causal window, several rows, whose first keys of one tile of rows lie in two tiles of 64 keys"),
)
class Blind513(Kernel):
    """A window's left edge is masked only in the first tile of 64 keys of a tile of 64 rows: where the rows' edges
    reach into the next tile, that one is not masked.
    """

    def visible(self, run, r, row, position, keys):
        if not run.causal or run.window < 0:
            return super().visible(run, r, row, position, keys)
        first = (position - row % 64 - run.window).clamp(min=0)[:, None] // 64 * 64
        rows = position[:, None]
        return (keys <= rows) & (keys >= first) & ((keys >= rows - run.window) | (keys >= first + 64))
