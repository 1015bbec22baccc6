"""Wrong kernels of the decode call, written without a look at the checks: numbers 283 to 326."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, Memory, decode_of, index, saturated
from lab.references.quantization import dequantize_nvfp4


@wrong(
    decode_of,
    trigger=("out given that holds anything but zeros, and over 512 keys in view; a second call with the same out too"),
)
class Blind283(Kernel):
    """Of a request of over 512 keys the parts are added to the output with atomics; a new output is zeroed before, one
    that is given is not.
    """

    def request(self, run, r):
        first, last = run.offsets[r : r + 2]
        before = run.out[first:last].to(run.dtype)
        super().request(run, r)
        if run.p.out is None or first == last:
            return
        start, end = self.span(run, r, self.positions(run, r, torch.arange(last - first)))
        if end - start > 512:
            run.out[first:last] = saturated(run.out[first:last].to(run.dtype) + before, run.out.dtype)


@wrong(decode_of, trigger="over 8 query heads for each of several K/V heads")
class Blind284(Kernel):
    """Of groups of over 8 heads 8 make a tile; a block takes its number among all tiles, modulo the K/V heads, for
    that of its K/V head.
    """

    def start(self, run):
        super().start(run)
        if run.group > 8:
            head = torch.arange(run.p.num_qo_heads)
            tiles = -(-run.group // 8)
            tile = head // run.group * tiles + head % run.group // 8
            run.head_map = tile % run.num_kv_heads


@wrong(decode_of, trigger="a call with a window after one of the same shape and dtypes without")
class Blind285(Kernel):
    """A compiled kernel is kept by shapes and dtypes, not by whether it has a window: where the first call of a shape
    had none, later ones have none either.
    """

    has_window = {}

    def start(self, run):
        super().start(run)
        p = run.p
        shape = tuple(p.query.shape), p.query.dtype, p.max_q_len, tuple(p.k_cache.shape[1:]), p.kv_dtype, p.batch_size
        if not self.has_window.setdefault(shape, run.window >= 0):
            run.window = -1


@wrong(decode_of, trigger="an NVFP4 cache")
class Blind286(Kernel):
    """Of NVFP4's values the one that is subnormal, 0.5, is read as 0."""

    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        if cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        got = index(cache, pages).clone()
        for low, sign in ((0x01, 0x07), (0x10, 0x70)):
            got[(got & sign) == low] &= 0xFF ^ sign
        factors = run.p.k_scale_factors if side == "k" else run.v_factors
        got = dequantize_nvfp4(got, index(factors, pages))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


@wrong(decode_of, trigger="mask, and draft tokens on both sides of a multiple of 256 keys")
class Blind287(Kernel):
    """The draft mask is applied in the last tile of 256 keys of a request alone; draft tokens before it are seen by
    every row.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.shown is None:
            return seen
        before = (keys < (run.lens[r] - 1) // 256 * 256).expand_as(seen)
        if run.window >= 0:
            before = before & (keys >= position.unsqueeze(1) - run.window)
        return seen | before


@wrong(
    decode_of,
    trigger=(
        "a batch of over 8 requests: requests 8 and on alone, slope 0.995 (in float16 beyond the bound, with an "
        "e4m3 query within it)"
    ),
)
class Blind288(Kernel):
    """Requests go 8 at a time; from the ninth on the reciprocal of the denominator is the first guess of a table, half
    a percent too small.
    """

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out * (0.995 if run.now >= 8 else 1.0), lse

    def request(self, run, r):
        run.now = r
        super().request(run, r)


@wrong(decode_of, trigger="an e4m3 cache with an entry of 256 or more in view")
class Blind289(Kernel):
    """An e4m3 cache is converted as if an exponent of ones meant infinity or NaN, as IEEE's formats have it: 256
    becomes infinite, 288 to 448 NaN.
    """

    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        cache = run.k_cache if side == "k" else run.v_cache
        if cache.dtype != E4M3:
            return got
        got = torch.where(got.abs() > 256, torch.nan, got)
        return torch.where(got.abs() == 256, got * torch.inf, got)


@wrong(decode_of, trigger="page 0 in the first column of a request with keys")
class Blind290(Kernel):
    """A request whose first page is page 0 is taken for padding of a CUDA graph, which an engine lays over that page,
    and is left as zero.
    """

    def request(self, run, r):
        first, last = run.offsets[r : r + 2]
        if first == last or run.lens[r] == 0 or int(run.k_table[r, 0]) != 0:
            super().request(run, r)
            return
        run.out[first:last] = 0
        if run.lse is not None:
            run.lse[first:last] = -math.inf


@wrong(decode_of, trigger="mask with a bit set at q_len or later, and a request that does not fill its last page")
class Blind291(Kernel):
    """The bits of a draft mask's row are not cut at q_len: where one after them is set, the row sees what stands after
    the request's last token in its last page.
    """

    def start(self, run):
        super().start(run)
        run.words = None
        if run.shown is not None:
            words = run.p.mask.to(torch.int32)
            run.words = ((words.unsqueeze(-1) >> torch.arange(16, dtype=torch.int32)) & 1).flatten(2).bool()

    def after(self, run, r):
        """Return how many tokens after the request's last one its rows see, at most those of its last page."""
        if run.words is None:
            return 0
        q_len, room = run.shown.shape[1], -run.lens[r] % run.page_size
        shown = run.words[r, :, q_len : q_len + room].any(0).nonzero()
        return int(shown.max()) + 1 if len(shown) else 0

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start, end + (self.after(run, r) if end == run.lens[r] and end else 0)

    def visible(self, run, r, row, position, keys):
        own = keys[keys < run.lens[r]]
        seen = super().visible(run, r, row, position, own)
        if len(own) == len(keys):
            return seen
        beyond = keys[len(own) :] - run.lens[r] + run.shown.shape[1]
        return torch.cat((seen, run.words[r][row][:, beyond]), 1)


@wrong(
    decode_of,
    trigger=(
        "a batch of 5 or more, of which one request has more keys in view than four times the mean length, rounded"
        " up to 128 (such as one among padding of length 1)"
    ),
)
class Blind292(Kernel):
    """The grid has tiles of 128 keys for four times the mean length of the batch: later keys of a request that is
    longer are not read.
    """

    def start(self, run):
        super().start(run)
        mean = -(-sum(run.lens) // max(run.batch, 1))
        run.room = -(-4 * mean // 128) * 128

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start, min(end, start + run.room)


@wrong(decode_of, trigger="a request whose newest key is alone in its tile of 128: 129, 257, 385, ... keys")
class Blind321(Kernel):
    """The loop over tiles of 128 keys runs while a tile's start is below the last key's place: a last tile of one key
    is not done, but for the first tile.
    """

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start, end - 1 if end > 128 and end % 128 == 1 and start < end - 1 else end


@wrong(decode_of, trigger="sinks, a group of 3, 5, 6, 7, ... heads, and rows * group over 64")
class Blind322(Kernel):
    """Rows and the heads of a group are packed in tiles of 64, whose sinks are found by the place in the tile modulo
    the group: from the second tile on that is right only where the group divides 64.
    """

    def sink_rows(self, run, r, position):
        if run.sinks is None:
            return None
        row = position - (run.lens[r] - (run.offsets[r + 1] - run.offsets[r]))
        head = torch.arange(run.p.num_qo_heads)
        place = (row.unsqueeze(1) * run.group + head % run.group) % 64
        return run.sinks[head // run.group * run.group + place % run.group]


@wrong(
    decode_of,
    trigger=("an e4m3 output of a query of 16 bits (slope 0.957; with an e4m3 query it is within the bound)"),
)
class Blind323(Kernel):
    """The cast to an e4m3 output truncates the mantissa to its three bits, where it should round."""

    def store(self, run, r, start, stop, out, lse):
        if run.out.dtype == E4M3:
            size = out.abs().clamp(2.0**-6, 448.0)
            step = torch.exp2(torch.floor(torch.log2(size)) - 3)
            out = torch.trunc(out / step) * step
        super().store(run, r, start, stop, out, lse)


@wrong(decode_of, trigger="sinks, an LSE, and a request without keys or of fewer keys than rows")
class Blind324(Kernel):
    """A row that sees no key gets the sink as its LSE, a natural logarithm, not log2(e) times the sink; only the LSE
    is wrong.
    """

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if sinks is not None:
            blind = ~seen.any(1)
            lse = torch.where(blind.unsqueeze(1), sinks.to(lse.dtype), lse)
        return out, lse


@wrong(decode_of, trigger="a second call with the same mask buffer after its contents changed")
class Blind325(Kernel):
    """The draft mask is unpacked once per buffer, and not again when an engine rewrites it for the next tree."""

    def __init__(self):
        self.memory = Memory()

    def unpack(self, run, mask):
        return self.memory.of(mask, lambda: super(Blind325, self).unpack(run, mask))


@wrong(decode_of, trigger="mask whose row does not show its own token")
class Blind326(Kernel):
    """With a draft mask every row sees its own token, also where the mask does not have that bit set."""

    def unpack(self, run, mask):
        return super().unpack(run, mask) | torch.eye(mask.shape[1], dtype=torch.bool)
