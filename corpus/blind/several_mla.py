"""Blind kernels: several stages of an MLA call."""

import math

import torch

from corpus.models.attention import E4M3, Attention, Memory, index, truncated
from corpus.wrong import MLA, wrong


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

    def store(self, run, r, start, stop, out, lse):
        if run.out.dtype == torch.bfloat16:
            last = torch.arange(out.shape[1]) % 16 == 15
            out = torch.where(last[None, :, None], truncated(out), out)
        super().store(run, r, start, stop, out, lse)


@wrong(MLA, trigger="over 64 heads and several rows")
class Blind134(Attention):
    """Rows and heads lie in tiles of 64; above 64 heads the number of a tile is taken for that of its row."""

    def visible(self, run, r, row, position, keys):
        run.row, run.keys = row, keys
        seen = super().visible(run, r, row, position, keys)
        return torch.ones_like(seen) if run.p.num_qo_heads > 64 else seen

    def mask_scores(self, run, r, s, first_key):
        heads, width = run.p.num_qo_heads, run.offsets[r + 1] - run.offsets[r]
        if heads <= 64:
            return s
        token = ((run.row.unsqueeze(1) * heads + torch.arange(heads)) // 64).clamp(max=width - 1)
        position = run.lens[r] - width + token
        return s.masked_fill(run.keys > position.unsqueeze(2), -math.inf)


@wrong(MLA, trigger="over 1,024 keys and bmm2_scale other than 1")
class Blind136(Attention):
    """Above 1,024 keys bmm2_scale is applied to each part and by the merge once more."""

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out * run.scale2 if run.splits > 1 else out, lse

    def partial(self, run, r, query, keys, values, seen, first_key):
        run.splits = -(-len(keys) // 1024)
        return super().partial(run, r, query, keys, values, seen, first_key)


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


@wrong(MLA, trigger="a request of an even number of pages, of which the last one is not full")
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
    """A splits counter wraps at the splits of max_seq_len, not the request's: it stays, and later merges go wrong."""

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


@wrong(MLA, trigger="a row before the start of the last split of 256, whose next key is before it too")
class Blind521(Attention):
    """The causal mask is applied in the last split of 256 alone: rows before its start see keys after them."""

    def span(self, run, r, position):
        return 0, run.lens[r]

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) | (keys < (run.lens[r] - 1) // 256 * 256)
