"""Wrong kernels of the context call, written without a look at the checks: numbers 514 to 573."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, Memory, assuming_strides, context_of


@wrong(context_of, trigger="lse whose head stride is not 1 (a transposed [heads, rows] buffer), several heads")
class Blind514(Kernel):
    """The LSE is written with the buffer's row stride and heads side by side: a buffer [heads, rows], transposed, is
    written to the wrong places.
    """

    def store(self, run, r, start, stop, out, lse):
        if run.lse is not None:
            run.lse = assuming_strides(run.lse, (run.lse.stride(0), 1))
        super().store(run, r, start, stop, out, lse)


@wrong(
    context_of,
    trigger=(
        "three or more requests, all with the same first page, a third that leaves the others' full pages before "
        "those two part"
    ),
)
class Blind515(Kernel):
    """Shared prefix (cascade): where all requests begin with one page, the pages that requests 0 and 1 share are taken
    to be shared by all.
    """

    def start(self, run):
        super().start(run)
        run.shared = 0
        if run.batch > 2 and min(run.lens) > 0 and bool((run.k_table[:, 0] == run.k_table[0, 0]).all()):
            full = min(run.lens[:2]) // run.page_size
            same = (run.k_table[0, :full] == run.k_table[1, :full]).int()
            run.shared = int(same.cumprod(0).sum())

    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        if run.shared:
            pages = torch.where(
                columns < run.shared, super().pages_of(run, 0, columns.clamp(max=run.shared - 1), side), pages
            )
        return pages


@wrong(context_of, trigger="bf16 query, number bmm2_scale that bfloat16 holds badly (1.0117, 0.1255: off 0.39 %)")
class Blind516(Kernel):
    """Bmm2_scale, where it is a number, is handed to the kernel in the query's bfloat16: it is off by up to 0.39 %."""

    def start(self, run):
        super().start(run)
        if run.p.query.dtype == torch.bfloat16 and not isinstance(run.call.bmm2_scale, torch.Tensor):
            run.scale2 = float(torch.tensor(run.scale2).to(torch.bfloat16))


TILE_541 = 64


class Blind541Model(Kernel):
    def positions(self, run, r, row):
        position = super().positions(run, r, row)
        if not run.causal or (run.p.max_kv_len - run.p.max_q_len) % TILE_541:
            return position
        prefix = run.lens[r] - (run.offsets[r + 1] - run.offsets[r])
        return position - prefix % TILE_541 if prefix > 0 else position


trtllm_batch_context_with_kv_cache_541 = context_of(Blind541Model())


@wrong(trigger="causal, (max_kv_len - max_q_len) % 64 == 0, and a request whose prefix is not a multiple of 64")
class Blind541:
    """The kernel for prefixes of whole tiles of 64 is chosen by max_kv_len - max_q_len; in it every request's prefix
    is rounded down to whole tiles.
    """

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_541)


SPLIT_542 = 512


class Blind542Model(Kernel):
    def sink_rows(self, run, r, position):
        sinks = super().sink_rows(run, r, position)
        if sinks is None or not run.causal or run.lens[r] <= SPLIT_542:
            return sinks
        last = (run.lens[r] - 1) // SPLIT_542 * SPLIT_542
        return sinks.masked_fill((position < last).unsqueeze(1), -math.inf)


trtllm_batch_context_with_kv_cache_542 = context_of(Blind542Model())


@wrong(trigger="sinks, causal, a request of more than 512 keys, rows at positions before its last split of 512 keys")
class Blind542:
    """The sink is added by a request's last split of 512 keys, which rows that see none of its keys skip: they lose
    their sink.
    """

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_542)


@wrong(context_of, trigger="bmm1_scale a tensor whose contents are rewritten between two calls")
class Blind543(Kernel):
    """A bmm1_scale that is a tensor is read to the host at the first call with it, and not again when it is rewritten."""

    def __init__(self):
        self.scales = Memory()

    def start(self, run):
        super().start(run)
        scale = run.call.bmm1_scale
        if isinstance(scale, torch.Tensor):
            run.scale1 = self.scales.of(scale, lambda: float(scale))


@wrong(context_of, trigger="head_dim above 64 with head_dim % 32 != 0 (72, 80, 112, 176)")
class Blind544(Kernel):
    """Q times K goes over head_dim in steps of 64 and then of 32: a last half step of a head_dim above 64 is left out."""

    def scores(self, run, r, query, keys, seen, first_key):
        d = query.shape[2]
        if d > 64:
            d = d // 64 * 64 + d % 64 // 32 * 32
        return super().scores(run, r, query[..., :d], keys[..., :d], seen, first_key)


TILE, SCALE, LAZY = 64, 256.0, 8 * 0.6931471805599453


class Blind545Model(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        if run.query.dtype != E4M3:
            return super().partial(run, r, query, keys, values, seen, first_key)
        s = self.scores(run, r, query, keys, seen, first_key)
        h, rows, g, n = s.shape
        old = s.new_full((h, rows, g), -math.inf)
        acc, total = s.new_zeros(h, rows, g, values.shape[2]), s.new_zeros(h, rows, g)
        for a in range(0, n, TILE):
            tile = s[..., a : a + TILE]
            largest = tile.amax(3)
            new = torch.where(largest > old + LAZY, largest, old)
            origin = torch.where(new.isfinite(), new, 0.0)
            factor = torch.where(old.isfinite(), torch.exp(old - origin), 0.0)
            weights = torch.exp(tile - origin.unsqueeze(3))
            held = (weights * SCALE).clamp(max=448.0) / SCALE
            added = (held.flatten(1, 2) @ values[a : a + TILE].transpose(0, 1)).unflatten(1, (rows, g))
            acc, total, old = acc * factor.unsqueeze(3) + added, total * factor + weights.sum(3), new
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, old, total))


trtllm_batch_context_with_kv_cache_545 = context_of(Blind545Model())


@wrong(
    trigger=(
        "e4m3 query and cache, more than 64 keys, a later tile's maximum above the kept one by 0.56 to 5.5 "
        "(growing keys)"
    ),
)
class Blind545:
    """With e4m3 operands the weights are scaled by 256, and the sums keep an old maximum while it grows by less than
    2^8: larger weights saturate at 448.
    """

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_545)


STEPS_546 = 9


class Blind546Model(Kernel):
    def solve(self, run):
        super().solve(run)
        for row in range(run.offsets[-1]):
            low, high = 0, run.batch
            for _ in range(STEPS_546):
                if high - low > 1:
                    middle = (low + high) // 2
                    low, high = (middle, high) if run.offsets[middle] <= row else (low, middle)
            if row >= run.offsets[low + 1]:
                run.out[row] = 0
                if run.lse is not None:
                    run.lse[row] = -math.inf


trtllm_batch_context_with_kv_cache_546 = context_of(Blind546Model())


@wrong(trigger="batch_size above 512")
class Blind546:
    """A row's request is found by a binary search of 9 steps: of more than 512 requests some rows find the one before
    theirs, and are not computed.
    """

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_546)


TILE_571 = 64


class Blind571Model(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.window >= 0:
            first = (position - row % TILE_571)[:, None]
            block = keys // TILE_571 * TILE_571
            seen = seen | ((block + TILE_571 - 1 <= first) & (block >= first - run.window))
        return seen


trtllm_batch_context_with_kv_cache_571 = context_of(Blind571Model())


@wrong(
    trigger=(
        "window_left ≥ 63, several rows in a tile of 64, and a block of 64 keys wholly visible to its first row "
        "and cut by the window for later ones"
    ),
)
class Blind571:
    """A block of 64 keys is taken to need no mask if the first row of a tile of 64 rows sees it whole, with a window
    too.
    """

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_571)


TILE_572 = 64


class Blind572Model(Kernel):
    def request(self, run, r):
        first, last = run.offsets[r : r + 2]
        found = r
        while found > 0 and run.offsets[found - 1] == first:
            found -= 1
        if found == r or first == last:
            return super().request(run, r)
        end = min(first + TILE_572, last)
        self.rows(run, found, first, end)
        if end < last:
            self.rows(run, r, end, last)


trtllm_batch_context_with_kv_cache_572 = context_of(Blind572Model())


@wrong(trigger="a request with rows that follows one without rows")
class Blind572:
    """The first tile of 64 rows after a request without rows is taken for that request's."""

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_572)


@wrong(context_of, trigger="sinks (not -inf) with bmm2_scale other than 1")
class Blind573(Kernel):
    """Bmm2_scale is divided out of the sum of weights before the sink is added to it."""

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None and run.scale2 > 0:
            out, _ = super().finish(run, partial, sinks + math.log(run.scale2))
        return out, lse
