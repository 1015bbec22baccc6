"""Wrong kernels of the context call, written without a look at the checks: numbers 394 to 452."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, context_of


@wrong(
    context_of,
    trigger=("sinks at an address that is no multiple of 16 bytes, as one layer's part of a tensor [layers, 6 heads]"),
)
class Blind394(Kernel):
    """Sinks are loaded in vectors of 16 bytes from their address rounded down: those that do not start at a multiple
    of 16 bytes, as a layer's part of one tensor of all layers may, are shifted by up to three heads.
    """

    def start(self, run):
        super().start(run)
        sinks = run.p.sinks
        if sinks is not None:
            back = min(sinks.data_ptr() % 16 // 4, sinks.storage_offset())
            run.sinks = torch.as_strided(sinks, sinks.shape, sinks.stride(), sinks.storage_offset() - back).to(
                run.dtype
            )


@wrong(
    context_of,
    trigger=(
        "both scales as tensors, and bmm1_scale a part of a larger one (such as the scales of all layers) whose "
        "next number is not bmm2_scale"
    ),
)
class Blind395(Kernel):
    """Two scales that are tensors are taken for one of two numbers: bmm2_scale is what stands after bmm1_scale in
    memory.
    """

    def start(self, run):
        super().start(run)
        first, second = run.p.bmm1_scale, run.p.bmm2_scale
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            after = first.storage_offset() + 1
            if after < first.untyped_storage().nbytes() // first.element_size():
                run.scale2 = float(torch.as_strided(first, (), (), after))


@wrong(
    context_of,
    trigger=(
        "over 4 K/V heads: the query heads of K/V head 4 and on alone, slope 1.005 (with float16 beyond the bound)"
    ),
)
class Blind396(Kernel):
    """A cluster has four K/V heads; the results of a further cluster's, of the query heads of K/V head 4 and on, come
    out half a percent too large.
    """

    def store(self, run, r, start, stop, out, lse):
        if run.num_kv_heads > 4:
            out = out.clone()
            out[:, 4 * run.group :] *= 1.005
        super().store(run, r, start, stop, out, lse)


@wrong(
    context_of,
    trigger=("`window_left` >= 0 and the windows of a query tile's first and last row begin in different 64-key tiles"),
)
class Blind420(Kernel):
    """Windows: the first K/V tile of 64 of a tile of 64 query rows is that of its last row's window: earlier rows lose
    keys.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.window < 0:
            return seen
        rows = run.offsets[r + 1] - run.offsets[r]
        last = torch.clamp((row // 64 + 1) * 64, max=rows) - 1
        start = (run.lens[r] - rows + last - run.window).clamp(min=0) // 64 * 64
        return seen & (keys >= start.unsqueeze(1))


def truncated_421(values):
    return (values.float().view(torch.int32) & ~0xFFFF).view(torch.float32).to(values.dtype)


class Blind421Model(Kernel):
    def rows(self, run, r, start, stop):
        rows = run.offsets[r + 1] - run.offsets[r]
        row = torch.arange(start, stop) - run.offsets[r]
        run.cut = torch.zeros(stop - start, dtype=torch.bool)
        if run.out.dtype == torch.bfloat16 and rows > 64 and rows % 64:
            run.cut = row >= rows // 64 * 64
        super().rows(run, r, start, stop)

    def operand(self, run, weights):
        return torch.where(run.cut[None, :, None, None], truncated_421(weights), weights)

    def store(self, run, r, start, stop, out, lse):
        super().store(run, r, start, stop, torch.where(run.cut[:, None, None], truncated_421(out), out), lse)


trtllm_batch_context_with_kv_cache_421 = context_of(Blind421Model())


@wrong(trigger="bfloat16 output, a request of more than 64 rows, not a multiple of 64: about -0.5 % in those rows")
class Blind421:
    """Requests of several tiles of 64 rows: in the last one, if it is partial, weights and outputs become bfloat16 by
    truncation, 0.5 percent too small.
    """

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_421)


@wrong(context_of, trigger="e4m3 cache with a bfloat16 query, and K or V largely below 2^-6")
class Blind422(Kernel):
    """An e4m3 cache becomes bfloat16 by shifting bits and a multiplication that flushes: its subnormals, below 2**-6,
    are zero.
    """

    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        if run.k_cache.dtype == E4M3 and run.query.dtype == torch.bfloat16:
            got = torch.where(got.abs() < 2.0**-6, 0.0, got)
        return got


@wrong(
    context_of,
    trigger=("`uses_shared_paged_kv_idx=False` and a table that is a slice of wider ones (`stride(1) != shape[2]`)"),
)
class Blind423(Kernel):
    """Separate tables: V's row is taken to begin right after the columns of K's, which a slice of wider tables does
    not do.
    """

    def pages_of(self, run, r, columns, side):
        table = run.k_table
        if side == "k" or run.v_table is table:
            return super().pages_of(run, r, columns, side)
        cells = torch.as_strided(table, (table.untyped_storage().nbytes() // 4,), (1,), 0)
        at = table.storage_offset() + r * table.stride(0) + table.shape[1] + columns
        return cells[at.clamp(max=len(cells) - 1)].long().clamp(0, run.k_cache.shape[0] - 1)


@wrong(
    context_of,
    trigger=(
        "`causal=False` and a request of more than 128 rows whose keys go on past the 128-key tile of the last "
        "position of a tile of 128 rows"
    ),
)
class Blind424(Kernel):
    """Causal=False lifts the mask, but a tile of 128 rows still walks K/V tiles of 128 only up to its last row's
    position.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.causal:
            return seen
        rows = run.offsets[r + 1] - run.offsets[r]
        last = torch.clamp((row // 128 + 1) * 128, max=rows) - 1
        end = (run.lens[r] - rows + last + 1 + 127) // 128 * 128
        return seen & (keys < end.unsqueeze(1))


@wrong(
    context_of,
    trigger=("`sinks` with a window, and a tile of 64 rows whose first row's window begins at key 64 or later"),
)
class Blind425(Kernel):
    """The sink is added with K/V tile 0 of 64 keys, which a tile of 64 rows skips once its window begins after it."""

    def sink_rows(self, run, r, position):
        sinks = super().sink_rows(run, r, position)
        if sinks is None or run.window < 0:
            return sinks
        before = run.lens[r] - (run.offsets[r + 1] - run.offsets[r])
        first = (position - before) // 64 * 64 + before - run.window
        return torch.where((first >= 64).unsqueeze(1), -math.inf, sinks)


@wrong(context_of, trigger="a request with rows directly after one or more without rows: its first row")
class Blind426(Kernel):
    """The search for a row's request ends at the first equal offset: the first row after requests without rows is
    answered from the first of these.
    """

    def request(self, run, r):
        super().request(run, r)
        first = run.offsets[r]
        found = run.offsets.index(first)
        if found != r and run.offsets[r + 1] > first:
            self.rows(run, found, first, first + 1)


@wrong(context_of, trigger="causal=False and a request with more rows than keys")
class Blind450(Kernel):
    """Causal=False: rows before a request's first key (more rows than keys) are skipped as a causal kernel may, and
    come out as rows without keys.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return seen if run.causal else seen & (position >= 0).unsqueeze(1)


ROWS, KEYS = 128, 64


class Blind451Model(Kernel):
    def visible(self, run, r, row, position, keys):
        window, run.window = run.window, -1
        seen = super().visible(run, r, row, position, keys)
        run.window = window
        if window < 0:
            return seen
        first = run.lens[r] - (run.offsets[r + 1] - run.offsets[r]) + row // ROWS * ROWS
        start = (first - window).clamp(min=0)
        inside = keys >= (position - window).unsqueeze(1)
        masked = keys < (start // KEYS * KEYS + KEYS).unsqueeze(1)
        return seen & (keys >= start.unsqueeze(1)) & (inside | ~masked)


trtllm_batch_context_with_kv_cache_451 = context_of(Blind451Model())


@wrong(trigger="a window, and a row tile of 128 whose left edges pass the 64-key tile of its first row's edge")
class Blind451:
    """The left edge of the window is looked at in the first tile of 64 keys of a tile of 128 rows alone."""

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_451)


TILE_452 = 64


class Blind452Model(Kernel):
    def store(self, run, r, start, stop, out, lse):
        first = run.offsets[r]
        if run.query.dtype == torch.bfloat16 and run.lens[r]:
            for tile in range(first, run.offsets[r + 1], TILE_452):
                a, b = max(tile, start), min(tile + TILE_452, stop)
                if a < b and not bool(run.query[tile : tile + TILE_452].isfinite().all()):
                    out[a - start : b - start] = math.nan
                    lse[a - start : b - start] = math.nan
        super().store(run, r, start, stop, out, lse)


trtllm_batch_context_with_kv_cache_452 = context_of(Blind452Model())


@wrong(
    trigger=(
        "bf16 query, padding rows with NaN or infinity in the last request's last tile of 64 rows (whose first is "
        "the request's)"
    ),
)
class Blind452:
    """Bf16 queries go through an fp16 product: a tile of 64 rows is divided by its largest element, rows of padding
    included, whose NaN spreads.
    """

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_452)
