"""Wrong kernels of the context call, written without a look at the checks: numbers 81 to 175."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, assuming_strides, context_of, index, packed_strides


@wrong(
    context_of,
    trigger=(
        "requests of different rows with padding rows that make up batch_size * max_q_len in all, e.g. rows 3, 1, "
        "5 and 6 of padding"
    ),
)
class Blind81(Kernel):
    """Where the query has batch_size * max_q_len rows, all requests are taken to have max_q_len of them;
    cum_seq_lens_q is not read.
    """

    def start(self, run):
        super().start(run)
        rows = run.p.max_q_len
        if rows and run.p.num_rows == run.batch * rows:
            run.offsets = list(range(0, run.p.num_rows + 1, rows))


@wrong(
    context_of,
    trigger=(
        "a window, and a request whose rows (of one tile of 128) have window starts in different tiles of 64 keys"
    ),
)
class Blind82(Kernel):
    """The window is masked in the first key tile (64 keys) of a tile of 128 rows only: rows whose window starts in a
    later tile see too much.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.window < 0:
            return seen
        first = (position - row % 128 - run.window).clamp(min=0)
        masked_end = (first // 64 + 1) * 64
        unmasked = (keys >= masked_end.unsqueeze(1)) & (keys <= position.unsqueeze(1))
        return seen | unmasked


@wrong(context_of, trigger="block_tables as a slice of a wider table (rows with gaps), with more than one request")
class Blind83(Kernel):
    """The page table's rows are taken to lie end to end: one that is a slice of a wider table is read from the wrong
    rows.
    """

    def start(self, run):
        super().start(run)
        table = run.call.block_tables
        table = assuming_strides(table, packed_strides(table.shape))
        run.k_table, run.v_table = (table, table) if table.ndim == 2 else (table[:, 0], table[:, 1])

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, run.k_cache.shape[0] - 1)


@wrong(context_of, trigger="64 new tokens or more behind a prefix of 1 more than a multiple of 64")
class Blind121(Kernel):
    """A tile of 64 rows ends its walk over tiles of 64 keys one key early, which shows where its first row's position
    is 1 more than a multiple of 64.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if not run.causal:
            return seen
        first = position - row % 64
        return seen & (keys < ((first + 63 + 63) // 64 * 64).unsqueeze(1))


@wrong(context_of, trigger="a request of one new token behind one of several")
class Blind122(Kernel):
    """Requests with one new token go down a decode path that reads the query row of the request's number."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        if run.offsets[r + 1] - run.offsets[r] == 1:
            at = min(r, run.p.num_rows - 1)
            query = index(run.query, slice(at, at + 1)).to(run.dtype)
        return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)


@wrong(context_of, trigger="separate page tables, 2 requests or more")
class Blind123(Kernel):
    """Separate page tables are read as [2, batch_size, columns]."""

    def start(self, run):
        super().start(run)
        if not run.call.uses_shared_paged_kv_idx:
            tables = run.call.block_tables.contiguous().view(2, run.batch, -1)
            run.k_table, run.v_table = tables.clamp(0, len(run.k_cache) - 1)


@wrong(context_of, trigger="causal=False, over 64 new tokens, and keys after the first rows' tile")
class Blind124(Kernel):
    """With causal=False tiles of 64 rows still end at the tile of keys of their own diagonal, all but a request's last
    tile.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.causal:
            return seen
        width = run.offsets[r + 1] - run.offsets[r]
        is_last = row // 64 == (width - 1) // 64
        end = ((position - row % 64 + 64 + 63) // 64 * 64).unsqueeze(1)
        return seen & (is_last.unsqueeze(1) | (keys < end))


@wrong(context_of, trigger="sinks, grouped heads, max_q_len at most 16")
class Blind125(Kernel):
    """Where max_q_len is at most 16, the heads of a group are packed into one tile, which has the sink of the group's
    first head.
    """

    def sink_rows(self, run, r, position):
        sinks = super().sink_rows(run, r, position)
        if sinks is None or run.p.max_q_len > 16:
            return sinks
        first = sinks.unflatten(1, (run.num_kv_heads, run.group))[:, :, :1]
        return first.expand(-1, -1, run.group).flatten(1)


@wrong(context_of, trigger="an e4m3 output with a value over 464")
class Blind126(Kernel):
    """An e4m3 output beyond 448 becomes NaN, as a conversion without saturation makes it."""

    def store(self, run, r, start, stop, out, lse):
        super().store(run, r, start, stop, out, lse)
        if run.out.dtype == E4M3:
            run.out[start:stop] = torch.where(out.abs() > 464, math.nan, out).to(E4M3)


@wrong(context_of, trigger="pages of 128 tokens or more with over 64 tokens")
class Blind127(Kernel):
    """Of pages of 128 tokens or more every tile of 64 keys reads the first 64."""

    def entries(self, run, side, pages, cut):
        if run.page_size < 128:
            return super().entries(run, side, pages, cut)
        tokens = super().entries(run, side, pages, slice(None)).unflatten(0, (len(pages), run.page_size))
        return tokens[:, torch.arange(run.page_size) % 64].flatten(0, 1)[cut]


@wrong(context_of, trigger="a window of 65 or more with a key before it; about 1 / (window + 1) too small")
class Blind128(Kernel):
    """With a window of more than 64 keys the softmax's denominator counts the key before the window too: outputs are
    too small.
    """

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


@wrong(context_of, trigger="two calls of one shape without out, the first one's result read after the second")
class Blind129(Kernel):
    """Where no out is given, the output is a buffer that the next call of the same shape writes again."""

    def __init__(self):
        self.buffers = {}

    def _call(self, call):
        result = super()._call(call)
        if call.out is not None:
            return result
        out = result[0] if call.return_lse else result
        buffer = self.buffers.setdefault((out.shape, out.dtype), torch.empty_like(out))
        buffer.copy_(out)
        return (buffer, result[1]) if call.return_lse else buffer


@wrong(context_of, trigger="385 to 512, 769 to 896, ... keys")
class Blind130(Kernel):
    """Tiles of 128 keys go through three stages; the last of 4, 7, 10, ... tiles finds in its stage the V of the tile
    three before it.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        tiles = -(-len(keys) // 128)
        if tiles > 3 and tiles % 3 == 1:
            last = (tiles - 1) * 128
            stale = values[last - 384 : last - 384 + len(values) - last]
            values = torch.cat((values[:last], stale))
        return super().partial(run, r, query, keys, values, seen, first_key)


@wrong(
    context_of,
    trigger=("a cache that is one tensor with gaps between its pages, as one layer of an allocation of all"),
)
class Blind131(Kernel):
    """Pages of a cache that is one tensor are taken to follow each other without gaps."""

    def start(self, run):
        super().start(run)
        cache = run.call.kv_cache
        if isinstance(cache, torch.Tensor):
            page = cache[0].numel()
            run.k_cache, run.v_cache = (
                assuming_strides(side, (page, *side.stride()[1:])) for side in (run.k_cache, run.v_cache)
            )


@wrong(context_of, trigger="a window, and a multiple of 128 between the first keys of two rows of a tile of 128")
class Blind132(Kernel):
    """A tile of 128 keys, other than the first, that begins within the window of the first row of a tile of 128 rows
    is not masked for any of them.
    """

    def visible(self, run, r, row, position, keys):
        if run.window < 0:
            return super().visible(run, r, row, position, keys)
        window, run.window = run.window, -1
        seen = super().visible(run, r, row, position, keys)
        run.window = window
        lower = (position - window).unsqueeze(1)
        tile = keys // 128 * 128
        inside = (tile > 0) & (tile >= lower - (row % 128).unsqueeze(1))
        return seen & (inside | (keys >= lower))


@wrong(
    context_of,
    trigger=(
        "causal, a request of over 128 new tokens, of which one in rows 128 to 255 (of each 256) is at a position "
        "at or after the first multiple of 128 behind row 127's"
    ),
)
class Blind174(Kernel):
    """Tiles of 128 rows go in pairs, to two blocks that share their tiles of 128 keys; the pair ends where the first
    tile's rows do, and the rows of the second lose the keys after that.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if not run.causal:
            return seen
        last_of_first = position - row % 256 + 127
        end = (last_of_first // 128 + 1) * 128
        return seen & ((row % 256 < 128).unsqueeze(1) | (keys < end.unsqueeze(1)))


@wrong(
    context_of,
    trigger=(
        "over 8 requests, of which one has rows that are no multiple of 64 and up to 63 rows after its end one of "
        "more keys: those rows are zero"
    ),
)
class Blind175(Kernel):
    """Tiles of 64 rows are stored whole, zeros after a request's last row, which the next request overwrites; but
    batches of over 8 start with the longest request, so that zeros come last.
    """

    def solve(self, run):
        self.start(run)
        run.out[run.offsets[-1] :] = 0
        if run.lse is not None:
            run.lse[run.offsets[-1] :] = -math.inf
        order = range(run.batch)
        if run.batch > 8:
            order = sorted(order, key=lambda r: -run.lens[r])
        for r in order:
            self.request(run, r)
            first, last = run.offsets[r : r + 2]
            run.out[last : first + -(-(last - first) // 64) * 64] = 0
