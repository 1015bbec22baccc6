"""Wrong kernels of the context call, written without a look at the checks: numbers 240 to 330."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, Memory, context_of


@wrong(context_of, trigger="two rows of 16 of a request whose largest logits (of one head) differ by over 100")
class Blind240(Kernel):
    """16 rows of a head share one largest logit, so that a row whose own is far below has weights of zero."""

    def partial(self, run, r, query, keys, values, seen, first_key):
        s = self.scores(run, r, query, keys, seen, first_key)
        h, rows, g, n = s.shape
        largest = s.amax(3) if n else s.new_full((h, rows, g), -math.inf)
        largest = torch.cat([x.amax(1, keepdim=True).expand_as(x) for x in largest.split(16, 1)], 1)
        weights = torch.exp(s - torch.where(largest.isfinite(), largest, 0.0).unsqueeze(3))
        acc = (weights.flatten(1, 2) @ values.transpose(0, 1)).unflatten(1, (rows, g))
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, largest, weights.sum(3)))


@wrong(context_of, trigger="causal, 4 or more query heads for each K/V head, a request of 2 or more new tokens")
class Blind241(Kernel):
    """Groups of 4 heads and more are packed with their rows into tiles of 128, whose causal mask takes the place in
    the tile for the token's.
    """

    def is_packed(self, run):
        return run.causal and run.group >= 4

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (start, run.lens[r]) if self.is_packed(run) else (start, end)

    def visible(self, run, r, row, position, keys):
        if not self.is_packed(run):
            return super().visible(run, r, row, position, keys)
        run.row, run.prefix = row, position - row
        seen = torch.ones(len(position), len(keys), dtype=torch.bool)
        return seen & (keys >= position.unsqueeze(1) - run.window) if run.window >= 0 else seen

    def mask_scores(self, run, r, s, first_key):
        if not self.is_packed(run):
            return s
        g = s.shape[2]
        packed = run.row.unsqueeze(1) * g + torch.arange(g)
        place = packed % 128
        last = run.prefix.unsqueeze(1) + (packed - place) // g + place
        keys = first_key + torch.arange(s.shape[3])
        return s.masked_fill(keys > last.unsqueeze(2), -torch.inf)


@wrong(context_of, trigger="causal=False, and a length that is no multiple of the page size")
class Blind242(Kernel):
    """With causal=False no tile of keys is masked, the last one neither: what stands after a request's last token in
    its last page is seen.
    """

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (start, end) if run.causal else (start, -(-run.lens[r] // run.page_size) * run.page_size)


@wrong(
    context_of,
    trigger=(
        "sinks that bfloat16 does not hold (a multiple of 1/64 it holds up to 4), large enough to count: the "
        "outputs from a sink of 4 or so in float16, of 8 in bfloat16, the LSE from 4"
    ),
)
class Blind243(Kernel):
    """Sinks are staged in shared memory as bfloat16, so that one of 4 to 8 is off by up to 0.016."""

    def start(self, run):
        super().start(run)
        if run.sinks is not None:
            run.sinks = run.sinks.to(torch.bfloat16).to(run.dtype)


@wrong(
    context_of,
    trigger=(
        "NaN in query rows after the last offset, within the last tile of 64 rows of the last request (whose rows "
        "are no multiple of 64), and a larger logit after the first 64 keys"
    ),
)
class Blind244(Kernel):
    """A tile of 64 rows votes whether its sums are rescaled, by the most that a row's largest logit grows; NaN in a
    row of padding that the tile loads with the last request's makes the vote no.
    """

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
        for start in range(0, len(keys), 64):
            cut = slice(start, start + 64)
            a, m, l = super().partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + start)
            largest = torch.maximum(largest, m)
            factor = torch.where(m.isfinite(), torch.exp(m - largest), 0.0)
            acc, total = acc + a * factor.unsqueeze(2), total + l * factor  # what was summed before stays as it is
        late = run.is_voted_down.unsqueeze(1)
        return torch.where(late.unsqueeze(2), acc, right[0]), largest, torch.where(late, total, right[2])


@wrong(context_of, trigger="a request of 129 to 192, 257 to 320, ... new tokens")
class Blind245(Kernel):
    """Tiles of 64 rows are taken in pairs, a light one from the front and a heavy one from the back; of an odd number
    over 1 nobody takes the one in the middle, which is left as zero.
    """

    def store(self, run, r, start, stop, out, lse):
        first, last = run.offsets[r : r + 2]
        tiles = -(-(last - first) // 64)
        if tiles > 1 and tiles % 2:
            middle = ((torch.arange(start, stop) - first) // 64 == tiles // 2).unsqueeze(1)
            out, lse = out.masked_fill(middle.unsqueeze(2), 0), lse.masked_fill(middle, 0)
        super().store(run, r, start, stop, out, lse)


@wrong(
    context_of,
    trigger=(
        "causal, and the key before a multiple of 256 lies after a row of a tile of 64 and not after the tile's "
        "last: prompts of over 256 tokens"
    ),
)
class Blind293(Kernel):
    """A tile of 256 keys that ends at or before the position of the last row of a tile of 64 rows is not masked, for
    none of these rows.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if not run.causal:
            return seen
        q_len = run.offsets[r + 1] - run.offsets[r]
        last = run.lens[r] - q_len + (row // 64 * 64 + 63).clamp(max=q_len - 1)
        whole = (keys // 256 * 256 + 255) <= last.unsqueeze(1)
        if run.window >= 0:
            whole = whole & (keys >= position.unsqueeze(1) - run.window)
        return seen | whole


@wrong(
    context_of,
    trigger=(
        "4 query heads or more for each K/V head: the last head of a group alone, slope 0.995 (in float16 beyond "
        "the bound)"
    ),
)
class Blind294(Kernel):
    """Of groups of 4 heads and more the last head shares its tile with padding, whose weights count a little in its
    denominator: it comes out half a percent too small.
    """

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        last = torch.arange(out.shape[1]) % run.group == run.group - 1
        biased = last & (run.group >= 4)
        return out * torch.where(biased, 0.995, 1.0).to(out.dtype)[:, None], lse


@wrong(context_of, trigger="two calls with different caches of the same shape, strides and dtype")
class Blind295(Kernel):
    """Descriptors of K and V are kept by the cache's shape, strides and dtype, not by its address: another cache of
    the same shape, as each layer has one, is not read, but the first one again.
    """

    described = {}

    def start(self, run):
        super().start(run)
        k, v = run.k_cache, run.v_cache
        key = tuple(k.shape), k.stride(), k.dtype, v.stride(), run.p.is_nvfp4
        if key not in self.described:
            while len(self.described) >= 64:
                del self.described[next(iter(self.described))]
            self.described[key] = (k, v)
        run.k_cache, run.v_cache = self.described[key]


@wrong(context_of, trigger="two live columns next to each other with the same page id")
class Blind296(Kernel):
    """A page that is that of the column before is not loaded again, nor are its keys multiplied again: the column
    counts for nothing.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if not len(keys):
            return seen
        column = keys // run.page_size
        table = run.k_table[r].long()
        again = (column > 0) & (table[column] == table[(column - 1).clamp(min=0)])
        return seen & ~again


@wrong(context_of, trigger="a window, pages of 64 tokens or more, and a row whose window begins at no multiple of 32")
class Blind297(Kernel):
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


@wrong(context_of, trigger="causal, and a request with keys but more rows than keys")
class Blind298(Kernel):
    """Where a request has more rows than keys its causal mask begins at the upper left corner: row i sees the keys up
    to i, not up to keys - rows + i.
    """

    def positions(self, run, r, row):
        position = super().positions(run, r, row)
        more_rows = run.offsets[r + 1] - run.offsets[r] > run.lens[r]
        return row if run.causal and more_rows else position


@wrong(context_of, trigger="causal=False with sinks and an LSE")
class Blind299(Kernel):
    """With causal=False the LSE leaves out the sink, which the output has."""

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None and not run.causal:
            _, lse = super().finish(run, partial, None)
        return out, lse


@wrong(
    context_of,
    trigger=("an odd group over 1 (3, 5, 7) and several K/V heads: the first head of every second group"),
)
class Blind300(Kernel):
    """Two blocks of a cluster take two query heads and share the tiles of the first one's K/V head, also where the
    second one is the first of the next group, as odd groups (over 1) have it.
    """

    def start(self, run):
        super().start(run)
        if run.group > 1 and run.group % 2:
            run.head_map = torch.arange(run.p.num_qo_heads) // 2 * 2 // run.group


@wrong(context_of, trigger="a second call with the same sinks tensor after its contents changed")
class Blind330(Kernel):
    """The sinks are multiplied by log2(e) into memory of the kernel's own once per buffer, and not again when the
    buffer is rewritten.
    """

    def __init__(self):
        self.memory = Memory()

    def start(self, run):
        super().start(run)
        if run.p.sinks is not None:
            run.sinks = self.memory.of(run.p.sinks, run.p.sinks.clone).to(run.dtype)
