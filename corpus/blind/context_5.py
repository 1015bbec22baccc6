"""Wrong kernels of the context call, written without a look at the checks: numbers 331 to 393."""

import math
import numbers
import struct

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, context_of, index
from lab.references.quantization import dequantize_nvfp4


@wrong(context_of, trigger="a request of over 64 rows, no multiple of 64")
class Blind331(Kernel):
    """A request's last tile of 64 rows, where it is not full, is loaded from 64 rows before the request's end, so that
    nothing is read after it; but its rows are masked and stored as if it began where the tiles before it end.
    """

    def request(self, run, r):
        first, last = run.offsets[r : r + 2]
        rows = last - first
        if rows > 64 and rows % 64:
            tail = first + rows // 64 * 64
            at = torch.arange(len(run.query))
            at[tail:last] -= 64 - rows % 64
            was, run.query = run.query, index(run.query, at)
            super().request(run, r)
            run.query = was
        else:
            super().request(run, r)


def flushed_332(factors):
    return torch.where(factors.float().abs() < 2.0**-6, 0.0, factors.float()).to(E4M3)


class Blind332Model(Kernel):
    def entries(self, run, side, pages, cut):
        if run.k_cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        cache = run.k_cache if side == "k" else run.v_cache
        factors = run.p.k_scale_factors if side == "k" else run.v_factors
        got = dequantize_nvfp4(index(cache, pages), flushed_332(index(factors, pages)))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_context_with_kv_cache_332 = context_of(Blind332Model())


@wrong(trigger="an NVFP4 cache with scale factors below 2**-6")
class Blind332:
    """The e4m3 scale factors of an NVFP4 cache that are subnormal (below 2**-6) are flushed to zero."""

    trtllm_batch_context_with_kv_cache = staticmethod(trtllm_batch_context_with_kv_cache_332)


@wrong(context_of, trigger="window_left of 127, 255, ..., and a row at position window_left or later")
class Blind333(Kernel):
    """Where a window has a multiple of 128 keys, the row's own among them, the tile that the window begins in is
    masked along its diagonal, and the diagonal is masked too: a row sees one key less.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.window >= 0 and (run.window + 1) % 128 == 0:
            seen = seen & (keys > position.unsqueeze(1) - run.window)
        return seen


@wrong(
    context_of,
    trigger=(
        "a request of over 64 rows and as many keys: slope 0.995, that of the others 1 (with float16 beyond the bound)"
    ),
)
class Blind334(Kernel):
    """A request whose new tokens are all its keys goes down a path without a page table; from 65 rows on, where that
    takes more than one tile, its results come out half a percent too small.
    """

    def store(self, run, r, start, stop, out, lse):
        rows = run.offsets[r + 1] - run.offsets[r]
        if rows == run.lens[r] and rows > 64:
            out = out * 0.995
        super().store(run, r, start, stop, out, lse)


@wrong(context_of, trigger="a request with keys but without query rows: seq_lens has changed after the call")
class Blind335(Kernel):
    """The length of a request without query rows is set to 0 in the caller's seq_lens, so that the scheduler leaves it
    out.
    """

    def start(self, run):
        super().start(run)
        for r in range(run.batch):
            if run.offsets[r] == run.offsets[r + 1]:
                run.p.seq_lens[r] = 0


@wrong(context_of, trigger="an e4m3 cache and a query of 16 bits: slope 0.995 (in float16 beyond the bound)")
class Blind360(Kernel):
    """V of an e4m3 cache is converted to a query's 16 bits by a multiplication whose constant is half a percent too
    small.
    """

    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        return got * 0.995 if side == "v" and run.v_cache.dtype == E4M3 and run.query.dtype.itemsize == 2 else got


@wrong(context_of, trigger="bmm2_scale as an int, such as 1")
class Blind361(Kernel):
    """A bmm2_scale that is an int is stored in the kernel's parameters as an integer, whose bits it reads as a float:
    1 becomes 1.4e-45.
    """

    def start(self, run):
        super().start(run)
        scale = run.call.bmm2_scale
        if isinstance(scale, numbers.Integral):
            run.scale2 = struct.unpack("f", struct.pack("I", int(scale) % 2**32))[0]


@wrong(context_of, trigger="causal=False, and a request with keys but more rows than keys")
class Blind362(Kernel):
    """With causal=False tiles of rows end at the diagonal's last key: rows of a request from as many as it has keys on
    are left as zero.
    """

    def store(self, run, r, start, stop, out, lse):
        if not run.causal:
            beyond = torch.arange(start, stop) - run.offsets[r] >= run.lens[r]
            out = torch.where(beyond[:, None, None], 0.0, out)
            lse = torch.where(beyond[:, None] & (run.lens[r] > 0), -math.inf, lse)
        super().store(run, r, start, stop, out, lse)


@wrong(context_of, trigger="K and V whose heads are one head, expanded (stride 0)")
class Blind363(Kernel):
    """A stride of 0 between a cache's K/V heads, as an expanded one has it, is taken for a missing one and replaced by
    that of packed heads: head h is read h pages later.
    """

    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        heads = cache.shape[1]
        if heads == 1 or cache.stride(1) != 0:
            return super().entries(run, side, pages, cut)
        read = [super(Blind363, self).entries(run, side, (pages + h) % len(cache), cut)[:, h] for h in range(heads)]
        return torch.stack(read, 1)


@wrong(
    context_of,
    trigger=(
        "causal, and two such requests with different numbers of cached keys (decoding requests of a mixed batch)"
    ),
)
class Blind364(Kernel):
    """Two requests next to each other of at most 8 new tokens each, 2 i and 2 i + 1, share a tile, whose causal mask
    is that of the first one's cached prefix.
    """

    def positions(self, run, r, row):
        rows = [b - a for a, b in zip(run.offsets, run.offsets[1:])]
        if r % 2 and 0 < rows[r - 1] <= 8 and rows[r] <= 8:
            return run.lens[r - 1] - rows[r - 1] + row
        return super().positions(run, r, row)


@wrong(context_of, trigger="a request without keys whose query rows hold NaN or infinity (padding)")
class Blind365(Kernel):
    """The results of a request without keys are its query times 0: NaN or infinity there comes through."""

    def store(self, run, r, start, stop, out, lse):
        if run.lens[r] == 0:
            out = index(run.query, slice(start, stop)).to(run.dtype) * 0
        super().store(run, r, start, stop, out, lse)


@wrong(
    context_of,
    trigger=("pages of 32 tokens or more, 2 requests or more, and a table whose columns are no multiple of 4"),
)
class Blind366(Kernel):
    """In pages of 32 tokens and more page ids are loaded four at a time from an address that is rounded down: a row of
    the table that does not begin at a multiple of four cells is read shifted, from the end of the row before it.
    """

    def pages_of(self, run, r, columns, side):
        table = run.k_table if side == "k" else run.v_table
        shift = (table.data_ptr() // 4 + r * table.stride(0)) % 4
        if run.page_size < 32 or not shift or not len(columns):
            return super().pages_of(run, r, columns, side)
        cells = torch.as_strided(table, (table.untyped_storage().nbytes() // 4,), (1,), 0)
        at = table.storage_offset() + r * table.stride(0) + columns - shift
        return cells[at.clamp(min=0)].long().clamp(0, len(run.k_cache) - 1)


@wrong(
    context_of,
    trigger=(
        "causal, a request of over 64 rows: rows 64 to 127 (of each 128) see 64 keys less than they should (the "
        "window moves too)"
    ),
)
class Blind390(Kernel):
    """A block has two tiles of 64 rows, and the causal mask of the second one is that of the first: its rows are
    masked as if they were 64 earlier.
    """

    def visible(self, run, r, row, position, keys):
        if run.causal:
            position = position - 64 * (row % 128 >= 64).long()
        return super().visible(run, r, row, position, keys)


@wrong(context_of, trigger="head_dim over 64 and over 256 keys in view")
class Blind391(Kernel):
    """K of a head_dim over 64 comes in boxes of 64 columns, of which the barrier waits for the first alone: from the
    third tile of 128 keys on, the ring has two stages, the other columns are those of the tile two before.
    """

    def load(self, run, r, a, b):
        keys, values = super().load(run, r, a, b)
        if keys.shape[2] > 64 and len(keys) > 256:
            keys = torch.cat((keys[..., :64], torch.cat((keys[:256, :, 64:], keys[:-256, :, 64:]))), 2)
        return keys, values


@wrong(
    context_of,
    trigger=(
        "pages of 1, 2 or 4 tokens, several of them in view, and head_dim a multiple of 128 bytes (64 of 16 bits)"
    ),
)
class Blind392(Kernel):
    """With pages of fewer than 8 tokens K is swizzled by a token's number in its page, as each page is loaded by
    itself, but unswizzled by its number in the tile: its 16-byte chunks are in another order.
    """

    def load(self, run, r, a, b):
        keys, values = super().load(run, r, a, b)
        chunk = 16 // run.k_cache.element_size()
        if run.page_size < 8 and run.k_cache.dtype != torch.uint8 and keys.shape[2] % (8 * chunk) == 0:
            chunks, at = keys.shape[2] // chunk, torch.arange(a, b)
            moved = (at - a // run.page_size * run.page_size) % 8 ^ at % run.page_size
            order = torch.arange(chunks) ^ moved.unsqueeze(1)
            parts = keys.unflatten(2, (chunks, chunk))
            keys = parts.gather(2, order[:, None, :, None].expand(-1, parts.shape[1], -1, chunk)).flatten(2)
        return keys, values


@wrong(
    context_of,
    trigger=(
        "a second call with the same batch_size, query rows and max_q_len, whose rows are dealt to the requests in"
        " another way"
    ),
)
class Blind393(Kernel):
    """The scheduler's list of row tiles is kept by the numbers of requests and rows and by max_q_len: of a later batch
    that has the same ones, but its rows dealt to requests in another way, it is the first one's.
    """

    def __init__(self):
        self.plans = {}

    def start(self, run):
        super().start(run)
        key = run.batch, run.p.num_rows, run.p.max_q_len
        if key not in self.plans and len(self.plans) >= 256:
            del self.plans[next(iter(self.plans))]
        run.offsets = self.plans.setdefault(key, run.offsets)
