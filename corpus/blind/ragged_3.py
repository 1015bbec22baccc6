"""Wrong kernels of the ragged context call, written without a look at the checks: numbers 309 to 433."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, assuming_strides, ragged_of


@wrong(ragged_of, trigger="a row whose logits are all negative and spread over more than 88")
class Blind309(Kernel):
    """The largest logit is found by an atomic maximum of integers, the floats' bits: of negative numbers alone it
    finds the smallest, and weights overflow where logits are far apart.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        s = self.scores(run, r, query, keys, seen, first_key)
        h, rows, g, n = s.shape
        if not n:
            return super().partial(run, r, query, keys, values, seen, first_key)
        largest, smallest = s.amax(3), s.masked_fill(s == -math.inf, math.inf).amin(3)
        largest = torch.where((largest < 0) & smallest.isfinite(), smallest, largest)
        origin = torch.where(largest.isfinite(), largest, 0.0)
        weights = torch.exp(s - origin.unsqueeze(3))
        acc = (weights.flatten(1, 2) @ values.transpose(0, 1)).unflatten(1, (rows, g))
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, largest, weights.sum(3)))


@wrong(ragged_of, trigger="is_causal=False, and a request of more keys than max_q_len rounded up to 128")
class Blind310(Kernel):
    """The kernel for is_causal=False bounds its walk over tiles of 128 keys by max_q_len, as the causal one's table of
    bounds has it for new tokens.
    """

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start, end if run.causal else min(end, -(-run.p.max_q_len // 128) * 128)


@wrong(ragged_of, trigger="a request with 3, 7, 11, ... tiles of 64 keys in view: 129 to 192 keys, 385 to 448, ...")
class Blind341(Kernel):
    """Tiles of 64 keys are walked four at a time; of three that are left over two are done."""

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        tiles = -(-(end - start) // 64)
        return start, start + (tiles - 1) * 64 if tiles % 4 == 3 else end


@wrong(ragged_of, trigger="lse whose heads do not lie side by side (a transposed one, every second element)")
class Blind342(Kernel):
    """Of a given lse the stride of rows is taken, but its heads to lie side by side: where they do not, as in a
    transposed one, values go to the wrong places.
    """

    def solve(self, run):
        lse = run.lse
        super().solve(run)
        if run.p.lse is None or lse.shape[1] == 1 or lse.stride(1) == 1:
            return
        values = lse.clone(memory_format=torch.contiguous_format)
        lse.zero_()
        assuming_strides(lse, (lse.stride(0), 1)).copy_(values)


@wrong(ragged_of, trigger="a request of one key, with sinks or a bmm2_scale other than 1")
class Blind343(Kernel):
    """The one key of a request with no others has a weight of 1, so that its value is copied to the output: bmm2_scale
    and the sink are left out.
    """

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if run.lens[r] == 1 and len(keys) == 1:
            copied = values[0].repeat_interleave(run.group, 0).to(out.dtype)
            out = torch.where(seen.any(1)[:, None, None], copied, out)
        return out, lse


@wrong(
    ragged_of,
    trigger=("a request of over 128 rows: rows 128 and on alone, slope 0.995 (with float16 beyond the bound)"),
)
class Blind344(Kernel):
    """A request's rows from the 128th on are another warp group's, whose results come out half a percent too small."""

    def store(self, run, r, start, stop, out, lse):
        row = torch.arange(start, stop) - run.offsets[r]
        factor = torch.where(row < 128, 1.0, 0.995).to(out.dtype)
        super().store(run, r, start, stop, out * factor[:, None, None], lse)


@wrong(ragged_of, trigger="return_lse=False and no lse: slope 1.005 (in float16 beyond the bound)")
class Blind371(Kernel):
    """The kernel without an LSE multiplies by an approximate reciprocal, half a percent too large."""

    def store(self, run, r, start, stop, out, lse):
        super().store(run, r, start, stop, out * 1.005 if run.lse is None else out, lse)


@wrong(
    ragged_of,
    trigger=(
        "two calls of the same shapes and dtypes, one with is_causal=True and one with False (new tokens and a "
        "chunk of a prefix)"
    ),
)
class Blind372(Kernel):
    """A compiled kernel is kept by the shapes and dtypes of query, key and value, not by is_causal: a chunk after new
    tokens of the same shapes is masked like them, and the other way round.
    """

    def __init__(self):
        self.kept = {}

    def start(self, run):
        super().start(run)
        p = run.p
        key = (
            tuple(p.query.shape),
            tuple(p.key.shape),
            tuple(p.value.shape),
            p.query.dtype,
            run.sinks is None,
            run.window < 0,
        )
        run.causal = self.kept.setdefault(key, run.causal)


@wrong(ragged_of, trigger="attention_sinks with minus infinity, and a row that sees no key")
class Blind373(Kernel):
    """A row that sees no key subtracts the largest logit from the sink: of a head without a sink that is infinity
    minus infinity, NaN.
    """

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if sinks is not None:
            wrong = ~seen.any(1, keepdim=True) & (sinks == -math.inf)
            out, lse = torch.where(wrong.unsqueeze(2), math.nan, out), torch.where(wrong, math.nan, lse)
        return out, lse


@wrong(ragged_of, trigger="a request of over 128 keys whose first token is at no multiple of 8")
class Blind374(Kernel):
    """Keys and values of a request of over 128 keys are loaded from its first token rounded down to a multiple of 8:
    it sees the last keys of the request before, and not its own last ones.
    """

    def load(self, run, r, a, b):
        if run.lens[r] <= 128:
            return super().load(run, r, a, b)
        first = run.kv_offsets[r] // 8 * 8
        return tuple(side[first + a : first + b].to(run.dtype) for side in (run.key, run.value))


@wrong(
    ragged_of,
    trigger=("a row that sees over 128 keys: such rows alone, slope 1.005 (with float16 beyond the bound)"),
)
class Blind401(Kernel):
    """Rows that see over 128 keys, more than one tile, come out half a percent too large."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        several = (seen.sum(1) > 128)[:, None, None]
        return torch.where(several, out * 1.005, out), lse


@wrong(
    ragged_of,
    trigger=(
        "lse given as a part of a larger buffer, heads side by side and no multiple of 4: what follows the last "
        "row, or lies between rows, has changed; the results are right"
    ),
)
class Blind402(Kernel):
    """The LSE is stored four heads at a time: where their number is no multiple of 4, up to three floats after a row's
    heads become zero; the next row is stored after that, but not what follows a given lse's last row, or lies
    between its rows.
    """

    def solve(self, run):
        super().solve(run)
        lse = run.lse
        if lse is None or lse.stride(1) != 1 or lse.shape[1] % 4 == 0:
            return
        rows, heads = lse.shape
        right = lse.clone()
        flat = torch.as_strided(lse, (lse.untyped_storage().nbytes() // 4,), (1,), 0)
        for row in range(rows):
            after = lse.storage_offset() + row * lse.stride(0) + heads
            flat[after : after + -heads % 4] = 0
        lse.copy_(right)


@wrong(ragged_of, trigger="a request of over 64 keys whose first one lies at no multiple of 64 in key")
class Blind403(Kernel):
    """A request of over 64 keys walks over tiles of 64 that lie at multiples of 64 in key, and nothing masks what its
    first tile has before it: its rows see the newest keys of the request before.
    """

    def load(self, run, r, a, b):
        first = run.kv_offsets[r]
        run.before = first % 64 if run.lens[r] > 64 and a == 0 else 0
        return super().load(run, r, a - run.before, b)

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return torch.cat((torch.ones(len(row), run.before, dtype=torch.bool), seen), 1)


@wrong(ragged_of, trigger="key and value with tokens after the last offset (a buffer of static size)")
class Blind404(Kernel):
    """The last request's keys end where key ends, not at the last offset: those of nobody after it are seen, and its
    rows' positions are counted from that end.
    """

    def start(self, run):
        super().start(run)
        if run.batch:
            run.lens[-1] = len(run.key) - run.kv_offsets[-2]


@wrong(
    ragged_of,
    trigger=("`is_causal` and a request of an odd number, 3 or more, of 128-row tiles (257 to 384 rows, ...)"),
)
class Blind431(Kernel):
    """Causal: tiles of 128 rows are computed in pairs, i and n - 1 - i, to balance the work: an odd number leaves the
    middle one out.
    """

    def request(self, run, r):
        super().request(run, r)
        first, last = run.offsets[r : r + 2]
        tiles = -(-(last - first) // 128)
        if run.causal and tiles > 1 and tiles % 2:
            middle = slice(first + tiles // 2 * 128, first + tiles // 2 * 128 + 128)
            run.out[middle] = 0
            if run.lse is not None:
                run.lse[middle] = -math.inf


@wrong(
    ragged_of,
    trigger=(
        "two calls with `return_lse`, no `lse`, and the same shape: the LSE of the first, read after the second. A"
        " second call only, LSE only"
    ),
)
class Blind432(Kernel):
    """The LSE that is returned, if none is given, is one buffer per shape: the next call overwrites what an earlier
    one returned.
    """

    def __init__(self):
        self.buffers = {}

    def paged(self, call):
        got = super().paged(call)
        if call.lse is not None or not call.return_lse:
            return got
        out, lse = got
        buffer = self.buffers.setdefault(tuple(lse.shape), lse)
        buffer.copy_(lse)
        return out, buffer


@wrong(ragged_of, trigger="`o_sf_scale` other than 1")
class Blind433(Kernel):
    """O_sf_scale, meant for outputs of 4 bits, is multiplied into every output: -1, as chunks have it, turns the sign."""

    def start(self, run):
        super().start(run)
        run.scale2 *= float(run.call.o_sf_scale)
