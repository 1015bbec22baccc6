"""Wrong kernels of the context call, written without a look at the checks: numbers 21 to 80."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, Memory, assuming_strides, context_of


@wrong(
    context_of,
    trigger=(
        "a context request with some 24,000 keys or more (0.04 at 24,000, 0.3 at 65,536; below 8,192 keys within "
        "the bound)"
    ),
)
class Blind21(Kernel):
    """The softmax's denominator is accumulated over tiles of 16 keys in float16: over thousands of tiles it stagnates."""

    def denominator(self, run, s, weights, largest):
        n = weights.shape[3]
        tiles = torch.nn.functional.pad(weights, (0, -n % 16)).unflatten(3, (-1, 16)).sum(4)
        if run.dtype == torch.float64 or tiles.shape[3] <= 1:
            return super().denominator(run, s, weights, largest)
        total = torch.zeros_like(tiles[..., 0])
        for tile in tiles.unbind(3):
            total = (total + tile).to(torch.float16).to(tiles.dtype)
        return total


@wrong(
    context_of,
    trigger=("a second context call with the same block_tables buffer after its page ids were rewritten"),
)
class Blind22(Kernel):
    """The page table is converted to 64 bits once per buffer, and not again when an engine rewrites it."""

    def __init__(self):
        self.converted = Memory()

    def start(self, run):
        super().start(run)
        table = self.converted.of(run.call.block_tables, lambda: run.call.block_tables.long())
        shared = run.call.uses_shared_paged_kv_idx
        run.k_table, run.v_table = (table, table) if shared else (table[:, 0], table[:, 1])

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, run.k_cache.shape[0] - 1)


@wrong(
    context_of,
    trigger=(
        "a context batch of over 128 requests; with 130 only two of them (64 and 129) are wrong, with 200 a third"
    ),
)
class Blind23(Kernel):
    """A tile finds its request by a binary search over cum_seq_lens_q of seven steps: with over 128 requests it stops
    one request early or late.
    """

    def start(self, run):
        super().start(run)
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


@wrong(context_of, trigger="causal=False with return_lse or lse; only the LSE is wrong")
class Blind24(Kernel):
    """With causal=False the LSE is still that of the causal scores."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if not run.causal and run.lse is not None:
            seen = seen & (first_key + torch.arange(len(keys)) <= position.unsqueeze(1))
            _, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        return out, lse


@wrong(context_of, trigger="sinks with a window, and a row at position window_left + 64 or later")
class Blind25(Kernel):
    """The sink enters with key tile 0 (64 keys): a row whose window starts after that tile never gets it."""

    def sink_rows(self, run, r, position):
        sinks = super().sink_rows(run, r, position)
        if sinks is not None and run.window >= 0:
            sinks = torch.where((position - run.window >= 64).unsqueeze(1), -math.inf, sinks)
        return sinks


@wrong(context_of, trigger="out given as a view with a storage offset other than 0")
class Blind26(Kernel):
    """The output is written from the start of out's allocation: a view further in gets nothing."""

    def start(self, run):
        super().start(run)
        run.out = torch.as_strided(run.out, run.out.shape, run.out.stride(), 0)


@wrong(context_of, trigger="a request without query rows directly before one with rows")
class Blind27(Kernel):
    """The request of a row is the first whose offset is the row's (bisect_left): a request without rows before it is
    taken instead.
    """

    def start(self, run):
        super().start(run)
        run.found = [run.offsets.index(offset) for offset in run.offsets[:-1]]
        lens = run.lens
        run.lens = [lens[found] for found in run.found]

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, run.found[r], columns, side)


@wrong(context_of, trigger="kv_cache as (K, V) whose V has other strides than K, e.g. V a slice of a wider buffer")
class Blind28(Kernel):
    """V is read with K's strides: a V that lies otherwise in memory is read from the wrong places."""

    def start(self, run):
        super().start(run)
        run.v_cache = assuming_strides(run.v_cache, run.k_cache.stride())


@wrong(context_of, trigger="head_dim > 64 that is no multiple of 64 (80, 96, 160)")
class Blind29(Kernel):
    """Q.K^T walks head_dim in chunks of 64 and drops the remainder (head dims such as 80, 96 or 160)."""

    def scores(self, run, r, query, keys, seen, first_key):
        dim = query.shape[2]
        whole = dim if dim < 64 else dim // 64 * 64
        return super().scores(run, r, query[..., :whole], keys[..., :whole], seen, first_key)


@wrong(
    context_of,
    trigger=("every context call: the batch's last request alone, slope 1.005 (in float16 beyond the bound)"),
)
class Blind30(Kernel):
    """The last request of a batch comes out half a percent too large (its normaliser counts the tile's padding
    wrongly).
    """

    def store(self, run, r, start, stop, out, lse):
        if r == run.batch - 1:
            out = out * 1.005
        super().store(run, r, start, stop, out, lse)


@wrong(
    context_of,
    trigger=(
        "block_tables with anything but 0 after a request's live pages (-1, stale ids, pages reserved for later): "
        "those cells are overwritten"
    ),
)
class Blind75(Kernel):
    """Cells of the page table after a request's last page are set to 0 in the caller's table, so that prefetches find
    a page there.
    """

    def paged(self, call):
        problem = call.problem()
        pages = (problem.seq_lens.to(torch.int64) + problem.page_size - 1) // problem.page_size
        for table in (problem.k_block_tables, problem.v_block_tables):
            dead = torch.arange(table.shape[1]) >= pages.unsqueeze(1)
            table.masked_fill_(dead, 0)
        return super().paged(call)


@wrong(context_of, trigger="a negative bmm1_scale, and logits of a row that spread over more than 88")
class Blind76(Kernel):
    """The running maximum is that of Q.K^T before the scale: with a negative bmm1_scale it is the smallest logit, and
    exp overflows.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        if run.scale1 >= 0 or not len(keys):
            return super().partial(run, r, query, keys, values, seen, first_key)
        s = self.scores(run, r, query, keys, seen, first_key)
        rows, g = s.shape[1:3]
        smallest = torch.where(s == -math.inf, math.inf, s).amin(3)
        origin = torch.where(smallest.isfinite(), smallest, 0.0)
        weights = torch.exp(s - origin.unsqueeze(3))
        acc = (weights.flatten(1, 2) @ values.transpose(0, 1)).unflatten(1, (rows, g))
        largest = torch.where(smallest.isfinite(), smallest, -math.inf)
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, largest, weights.sum(3)))


@wrong(
    context_of,
    trigger=("two requests whose tables have the same first page id and differ in a later page that both have whole"),
)
class Blind77(Kernel):
    """Requests with the same first page are taken to share a prefix (cascade): the pages both have whole are read from
    the first one's row.
    """

    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        table, ps = run.k_table, run.page_size
        leader = next((i for i in range(r) if run.lens[i] >= ps and table[i, 0] == table[r, 0]), None)
        if leader is None or run.lens[r] < ps:
            return pages
        shared = columns < min(run.lens[leader], run.lens[r]) // ps
        return torch.where(shared, super().pages_of(run, leader, columns.clamp(max=table.shape[1] - 1), side), pages)


@wrong(
    context_of,
    trigger=(
        "float16 query, and weights times V that add up to more than 65,504 before the division, e.g. 600 keys of "
        "like weight and a V around 300"
    ),
)
class Blind78(Kernel):
    """With a float16 query the unnormalised P.V is kept in float16: sums beyond 65,504 become infinite."""

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        if run.p.query.dtype == torch.float16:
            acc = torch.where(acc.abs() > 65504, torch.sign(acc) * math.inf, acc)
        return acc, largest, total


@wrong(
    context_of,
    trigger=(
        "a request with rows and seq_lens 0, with out or lse given (holding anything but 0 and minus infinity) or new"
    ),
)
class Blind79(Kernel):
    """Requests without keys are skipped by the scheduler: their rows of out and lse keep what was there."""

    def request(self, run, r):
        if run.lens[r]:
            super().request(run, r)


@wrong(
    context_of,
    trigger=(
        "a context call of 128 query rows or more: rows 127, 255, ... of the query alone, slope 0.995 (in float16 "
        "beyond the bound)"
    ),
)
class Blind80(Kernel):
    """The last row of each tile of 128 rows of the whole query, across requests, comes out half a percent too small."""

    def store(self, run, r, start, stop, out, lse):
        last = torch.arange(start, stop) % 128 == 127
        super().store(run, r, start, stop, torch.where(last[:, None, None], 0.995 * out, out), lse)
