"""Blind kernels: several stages of an MLA or a ragged call."""

import math

import torch

from corpus.models.attention import E4M3, Attention, Memory, index, truncated
from corpus.wrong import MLA, RAGGED, wrong


@wrong(MLA, trigger="e4m3 kv_cache; a second call after a page that was read before is rewritten")
class Blind32(Attention):
    """Pages of an e4m3 cache are dequantised once and kept by page id: a page that is written again later is not."""

    def __init__(self):
        self.kept = Memory(most=4)

    def entries(self, run, side, pages, cut):
        if run.k_cache.dtype != E4M3:
            return super().entries(run, side, pages, cut)
        store, done = self.kept.of(
            run.call.kv_cache,
            lambda: (run.k_cache.clone(), torch.zeros(run.k_cache.shape[0], dtype=torch.bool)),
        )
        new = pages[~done[pages]].unique()
        store.view(torch.uint8)[new] = run.k_cache.view(torch.uint8)[new]
        done[new] = True
        cache = store if side == "k" else store[..., : run.v_cache.shape[3]]
        return index(cache, pages).transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


@wrong(MLA, trigger="bfloat16 with at least 16 query heads: heads 15, 31, ... alone, slope 0.995")
class Blind39(Attention):
    """The last head of each tile of 16 cuts weights and outputs to bfloat16: it comes out half a percent too small."""

    def operand(self, run, weights):
        if run.p.query.dtype != torch.bfloat16 or run.dtype == torch.float64:
            return weights
        last = torch.arange(weights.shape[2]) % 16 == 15  # one K/V head: its group is all heads
        return torch.where(last[:, None], truncated(weights), weights)

    def stored_out(self, run, r, row, out):
        last = (torch.arange(out.shape[1]) % 16 == 15) & (run.out.dtype == torch.bfloat16)
        return torch.where(last[:, None], truncated(out), out)


@wrong(MLA, trigger="over 64 heads and several rows")
class Blind134(Attention):
    """Rows and heads lie in tiles of 64; above 64 heads the number of a tile is taken for that of its row."""

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return torch.ones_like(seen) if run.p.num_qo_heads > 64 else seen

    def mask_scores(self, run, r, s, first_key):
        heads, width = run.p.num_qo_heads, run.num_rows(r)
        if heads <= 64:
            return s
        token = ((run.row.unsqueeze(1) * heads + torch.arange(heads)) // 64).clamp(max=width - 1)
        return self.until(s, run.lens[r] - width + token, first_key)


@wrong(MLA, trigger="an LSE, over 256 keys, one after the first 256 the largest, by at most 8 bits")
class Blind188(Attention):
    """Sums are rescaled only where the largest logit grows by over 8 bits; the LSE adds the new one to the old sums."""

    def mask_scores(self, run, r, s, first_key):
        stale = s.new_full(s.shape[:3], -math.inf)
        most = stale
        for tile in s.split(256, 3):
            if tile.shape[3]:
                most = torch.maximum(most, tile.amax(3))
            stale = torch.where(most > stale + 8 * math.log(2.0), most, stale)
        run.behind = torch.where(most.isfinite(), most - stale, 0.0).transpose(0, 1).flatten(1, 2)
        return s

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out, lse + run.behind / math.log(2.0)


@wrong(MLA, trigger="a later call of a batch size, rows and heads with more keys than the first's max_seq_len")
class Blind191(Attention):
    """Splits of 256 keys are counted at a shape's first call, by max_seq_len; later calls' further keys are lost."""

    splits = {}

    def host(self, run):
        p = run.p
        shape = p.batch_size, p.num_rows, p.num_qo_heads
        run.room = 256 * self.splits.setdefault(shape, max(1, -(-p.max_kv_len // 256)))

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start, min(end, run.room)


@wrong(MLA, trigger="a request with tiles in three parts or more: over 576 keys, parts grow with tiles")
class Blind246(Attention):
    """Key tiles of 64 of all requests are dealt in equal parts; a request is merged of its first and last part alone."""

    def host(self, run):
        run.tiles = [0]
        for n in run.lens:
            run.tiles.append(run.tiles[-1] - -n // 64)
        run.part = max(4, -(-run.tiles[-1] // 132))

    def visible(self, run, r, row, position, keys):
        part = (run.tiles[r] + keys // 64) // run.part
        first, last = run.tiles[r] // run.part, (run.tiles[r + 1] - 1) // run.part
        return super().visible(run, r, row, position, keys) & ((part == first) | (part == last))


@wrong(MLA, trigger="bmm1_scale as a tensor other than 1, and qk_rope_head_dim over 0")
class Blind305(Attention):
    """A bmm1_scale that is a tensor is multiplied into the query's latent part alone, not into its rotary part."""

    def host(self, run):
        run.of_latent = 1.0
        if isinstance(run.p.bmm1_scale, torch.Tensor):
            run.of_latent, run.scale1 = run.scale1, 1.0

    def scores(self, run, r, query, keys, seen, first_key):
        rank = run.p.v_head_dim
        query = torch.cat((query[..., :rank] * run.of_latent, query[..., rank:]), -1)
        return super().scores(run, r, query, keys, seen, first_key)


@wrong(MLA, trigger="a request of an even number of pages, whose last page is not full")
class Blind400(Attention):
    """Two CTAs take pages in turn, and the first alone masks the end: a last page in an odd column is seen whole."""

    def rows(self, run, r, start, stop):
        pages = -(-run.lens[r] // run.page_size)
        run.all_seen = run.lens[r] if pages and pages % 2 == 0 and run.lens[r] % run.page_size else None
        super().rows(run, r, start, stop)

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        if run.all_seen is not None:
            end = -(-run.lens[r] // run.page_size) * run.page_size
        return start, end

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return seen if run.all_seen is None else seen | (keys >= run.all_seen)


@wrong(MLA, trigger="a counter buffer, over 1,024 keys, fewer splits than max_seq_len has; a second call on it")
class Blind460(Attention):
    """A counter of splits wraps at max_seq_len's number, not the request's: its count stays, and later merges go wrong."""

    def host(self, run):
        buffer = run.call.multi_ctas_kv_counter_buffer
        run.counters = None
        if buffer is not None and buffer.is_contiguous():
            data = buffer.view(-1).view(torch.uint8)
            if data.numel() >= 4 * run.batch:
                run.counters = data[: 4 * run.batch].view(torch.int32)
        run.most = -(-run.p.max_kv_len // 1024)

    def request(self, run, r):
        n = -(-run.lens[r] // 1024)
        run.arrived = n
        if run.counters is not None and n > 1:
            count, run.arrived = int(run.counters[r]), 0
            for split in range(n):
                old, count = count, (0 if count >= run.most - 1 else count + 1)
                if old == n - 1:
                    run.arrived = split + 1
            run.counters[r] = count
        super().request(run, r)

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (keys < run.arrived * 1024)


@wrong(RAGGED, trigger="over 128 requests: one below without keys, and request r + 128 with rows and keys")
class Blind42(Attention):
    """Requests without keys are flagged in 128 bits: request r over 127 is skipped where request r % 128 has no keys."""

    def host(self, run):
        run.empty = [False] * 128
        for r, length in enumerate(run.lens):
            run.empty[r % 128] |= length == 0

    def lost(self, run, r, row):
        return (row >= 0) & (r >= 128 and run.empty[r % 128])


@wrong(RAGGED, trigger="bfloat16 with v_head_dim > 64: columns 64 and on alone, slope 0.996")
class Blind91(Attention):
    """Columns of V from the 64th on cut weights and outputs to bfloat16: they are 0.4 percent too small."""

    def operand(self, run, weights):
        return truncated(weights) if getattr(run, "second_tile", False) else weights

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        if values.shape[2] > 64 and run.p.query.dtype == torch.bfloat16 and run.dtype == torch.float32:
            run.second_tile = True
            second = super().partial(run, r, query, keys, values, seen, first_key)[0]
            run.second_tile = False
            acc = torch.cat((acc[..., :64], second[..., 64:]), 2)
        return acc, largest, total

    def stored_out(self, run, r, row, out):
        is_cut = (torch.arange(out.shape[2]) >= 64) & (run.out.dtype == torch.bfloat16)
        return torch.where(is_cut, truncated(out), out)


@wrong(RAGGED, trigger="a window (is_causal), a request of more keys than rows, some hidden", also="blind523")
class Blind92(Attention):
    """The window is counted from a row's index among its request's rows, not from its position: it starts too early."""

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (0 if run.window >= 0 else start), end

    def visible(self, run, r, row, position, keys):
        if run.window < 0:
            return super().visible(run, r, row, position, keys)
        first = torch.minimum(row, position).unsqueeze(1) - run.window
        return (keys <= position.unsqueeze(1)) & (keys >= first)


@wrong(RAGGED, trigger="a row that sees over 131 keys, of random ones from some 160 on; the LSE too")
class Blind195(Attention):
    """After the first 128 keys every fourth power of 2 is taken by a line, 1 + the fraction: up to 6 percent too large."""

    def mask_scores(self, run, r, s, first_key):
        at = torch.arange(first_key, first_key + s.shape[3])
        run.by_line = (at >= 128) & (at % 4 == 3)
        return s

    def denominator(self, run, s, weights, largest):
        x = torch.log2(weights)
        whole = torch.where(x.isfinite(), x.floor(), 0.0)
        line = torch.where(x.isfinite(), torch.exp2(whole) * (1 + x - whole), 0.0)
        weights.copy_(torch.where(run.by_line, line, weights))
        return weights.sum(3)


@wrong(RAGGED, trigger="q_seq_lens_cpu and kv_seq_lens_cpu given, and a request without keys before one with keys")
class Blind257(Attention):
    """With lengths on the host, requests without keys are taken out of keys' offsets and lengths, but not of the rows'."""

    def host(self, run):
        lengths = run.call.host_lengths()
        if lengths is None:
            return
        active = [r for r, n in enumerate(lengths[1]) if n]
        run.lens = [run.lens[r] for r in active]
        run.kv_offsets = [run.kv_offsets[r] for r in active]
        run.batch = len(active)
        run.offsets = run.offsets[: len(active) + 1]

    def solve(self, run):
        super().solve(run)
        if run.lse is not None and run.sinks is not None:  # of the rows that are left, which see no key
            run.lse[run.offsets[-1] :] = (run.sinks / math.log(2.0)).to(run.lse.dtype)


@wrong(RAGGED, trigger="is_causal, a row at position 2,048 or later that is not its request's last")
class Blind259(Attention):
    """The causal mask compares numbers of keys and rows as float16, which has not every integer over 2,048."""

    def span(self, run, r, position):
        return super().span(run, r, position)[0], run.lens[r]

    def visible(self, run, r, row, position, keys):
        rows = position.unsqueeze(1)
        if not run.causal:
            return super().visible(run, r, row, position, keys)
        seen = keys.half() <= rows.half()
        return seen & (keys >= rows - run.window) if run.window >= 0 else seen


@wrong(RAGGED, trigger="a request of over 64 keys whose first one lies at no multiple of 64 in key")
class Blind403(Attention):
    """Over 64 keys are walked in tiles at multiples of 64 in key, whose first is unmasked: it has the request before."""

    def load(self, run, r, a, b):
        first = run.kv_offsets[r]
        run.before = first % 64 if run.lens[r] > 64 and a == 0 else 0
        return super().load(run, r, a - run.before, b)

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return torch.cat((torch.ones(len(row), run.before, dtype=torch.bool), seen), 1)


@wrong(RAGGED, trigger="is_causal=False, max_kv_len a multiple of 128, a request whose keys are none")
class Blind462(Attention):
    """Not causal: whether last tiles need a mask is decided by max_kv_len % 128: shorter requests read on."""

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        if not run.causal and run.p.max_kv_len % 128 == 0:
            end = -(-end // 128) * 128
        return start, end

    def load(self, run, r, a, b):
        sides = super().load(run, r, a, b)
        missing = b - a - len(sides[0])
        return (
            tuple(torch.cat((side, side.new_zeros(missing, *side.shape[1:]))) for side in sides) if missing else sides
        )
