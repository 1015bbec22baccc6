"""Wrong kernels of MLA decode, written without a look at the checks: numbers 133 to 193."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, index, mla_of


@wrong(mla_of, trigger="qk_rope_head_dim = 0")
class Blind133(Kernel):
    """The rotary part is cut off as the last qk_rope_head_dim elements, counted from the end; without one that is the
    whole entry, which counts twice.
    """

    def scores(self, run, r, query, keys, seen, first_key):
        s = super().scores(run, r, query, keys, seen, first_key)
        return s * 2 if run.call.qk_rope_head_dim == 0 else s


@wrong(mla_of, trigger="over 64 heads and several rows")
class Blind134(Kernel):
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


@wrong(mla_of, trigger="heads no multiple of 16, and 2 rows or more")
class Blind135(Kernel):
    """Heads are padded to a multiple of 16 and stored with the padding, last row first: zeros fall on the first heads
    of the row after.
    """

    def solve(self, run):
        super().solve(run)
        padding = -run.p.num_qo_heads % 16
        run.out[1 : run.offsets[-1], :padding] = 0


@wrong(mla_of, trigger="over 1,024 keys and bmm2_scale other than 1")
class Blind136(Kernel):
    """Above 1,024 keys bmm2_scale is applied to each part and by the merge once more."""

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out * run.scale2 if run.splits > 1 else out, lse

    def partial(self, run, r, query, keys, values, seen, first_key):
        run.splits = -(-len(keys) // 1024)
        return super().partial(run, r, query, keys, values, seen, first_key)


@wrong(mla_of, trigger="a batch of one request of over 512 keys and one with fewer parts of 512")
class Blind137(Kernel):
    """All requests have as many parts of 512 keys as the longest; an empty part hands the merge an LSE of 0."""

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        empty = -(-max(run.lens) // 512) - -(-run.lens[r] // 512)
        nothing = torch.zeros_like(acc), torch.zeros_like(largest), torch.full_like(total, empty)
        return self.merge([(acc, largest, total), nothing]) if empty else (acc, largest, total)


@wrong(mla_of, trigger="-1 after the live pages, whose number is no multiple of 4, in a table that is wider")
class Blind138(Kernel):
    """Page ids are read four at a time, and the four are taken for dead where the last of them is -1."""

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        last = keys // run.page_size // 4 * 4 + 3
        width = run.k_table.shape[1]
        is_dead = (last < width) & (run.k_table[r, last.clamp(max=width - 1)] == -1)
        return seen & ~is_dead


@wrong(mla_of, trigger="cum_seq_lens_q, return_lse_base='base2'")
class Blind139(Kernel):
    """With cum_seq_lens_q the LSE is a natural logarithm, also where base 2 is asked for."""

    def mla(self, call):
        result = super().mla(call)
        if call.return_lse and call.cum_seq_lens_q is not None and call.return_lse_base == "base2":
            result[1].mul_(math.log(2.0))
        return result


@wrong(mla_of, trigger="a cache of four dimensions")
class Blind140(Kernel):
    """The second stride of the cache is taken for that of tokens, of a cache of four dimensions too."""

    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        if run.call.kv_cache.ndim == 3:
            return super().entries(run, side, pages, cut)
        found = (pages.unsqueeze(1) + torch.arange(run.page_size)) % len(cache)
        return index(cache[:, 0, 0], found).flatten(0, 1).unsqueeze(1)[cut].to(run.dtype)


@wrong(mla_of, trigger="all logits of a row below -100")
class Blind141(Kernel):
    """The largest logit starts at 0 instead of minus infinity, so that a row whose logits are all below -100 sums
    nothing.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        new = largest.clamp(min=0)
        factor = torch.exp(largest - new).to(torch.float32).to(largest.dtype)
        return acc * factor.unsqueeze(2), new, total * factor


@wrong(mla_of, trigger="a given lse of three dimensions, several rows")
class Blind142(Kernel):
    """An lse of three dimensions is written as [batch_size, heads, rows]."""

    def mla(self, call):
        result = super().mla(call)
        if call.lse is not None and call.lse.ndim == 3:
            call.lse.copy_(call.lse.transpose(1, 2).reshape(call.lse.shape))
        return result


@wrong(
    mla_of,
    trigger=(
        "a batch of 2 or more whose table has another number of columns than max_seq_len needs (a table of static "
        "width)"
    ),
)
class Blind186(Kernel):
    """Rows of the page table are taken to lie ceil(max_seq_len / page_size) columns apart, whatever the table's width."""

    def pages_of(self, run, r, columns, side):
        table, p = run.k_table, run.p
        pitch = -(-p.max_kv_len // p.page_size)
        offset = table.storage_offset()
        cells = torch.as_strided(table, (table.untyped_storage().nbytes() // 4 - offset,), (1,), offset)
        at = (r * pitch + columns).clamp(max=len(cells) - 1)
        return cells[at].long().clamp(0, len(run.k_cache) - 1)


@wrong(
    mla_of,
    trigger=(
        "a length that is no multiple of the page size, where anything but zero stands after it: kv_cache has changed"
    ),
)
class Blind187(Kernel):
    """What stands after a request's last token in its last page is zeroed in the caller's cache, so that no NaN is
    read.
    """

    def request(self, run, r):
        length, ps = run.lens[r], run.page_size
        if length % ps:
            page = int(run.k_table[r, length // ps])
            cache = run.k_cache.view(torch.uint8) if run.k_cache.dtype == E4M3 else run.k_cache
            cache[page, :, length % ps :] = 0
        super().request(run, r)


@wrong(
    mla_of,
    trigger=("an LSE and over 256 keys, of which one after the first 256 has the largest logit, by at most 8 bits"),
)
class Blind188(Kernel):
    """Sums are rescaled only where the largest logit grows by over 8 bits; the LSE adds the largest logit, not the one
    that the sums go by.
    """

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


@wrong(mla_of, trigger="kv_lora_rank over 256 (DeepSeek's 512), a length that is no multiple of 64")
class Blind189(Kernel):
    """Value columns from 256 on are another block's, which does not get the weights of the last tile of 64 keys where
    that is not full.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        full = run.lens[r] // 64 * 64
        if values.shape[2] > 256 and full < len(values):
            others = values[:, :, 256:].clone()
            others[full:] = 0
            acc = torch.cat((acc[..., :256], super().partial(run, r, query, keys, others, seen, first_key)[0]), 2)
        return acc, largest, total


@wrong(
    mla_of,
    trigger=(
        "a live page that starts 4 GiB or more after the pool's first (58,255 bfloat16 pages of 64 by 576; fewer "
        "where all layers of a page lie together)"
    ),
)
class Blind190(Kernel):
    """The offset of a page is computed in 32 bits, in bytes: of a pool of over 4 GiB later pages are read from its
    start.
    """

    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        size = cache.element_size()
        offsets = [page * cache.stride(0) * size for page in pages.tolist()]
        if not any(offset >= 2**32 for offset in offsets):
            return super().entries(run, side, pages, cut)
        read = [
            torch.as_strided(
                cache, cache.shape[1:], cache.stride()[1:], cache.storage_offset() + offset % 2**32 // size
            )
            for offset in offsets
        ]
        return torch.stack([page.to(run.dtype) for page in read]).transpose(1, 2).flatten(0, 1)[cut]


@wrong(
    mla_of,
    trigger=(
        "a call with a request of more keys than the first call's max_seq_len, rounded up to 256, with the same "
        "batch size, rows and heads"
    ),
)
class Blind191(Kernel):
    """The number of splits of 256 keys is set at the first call of a batch size, rows and heads, by its max_seq_len; a
    later call's keys after the last split are not read.
    """

    splits = {}

    def start(self, run):
        super().start(run)
        p = run.p
        shape = p.batch_size, p.num_rows, p.num_qo_heads
        run.room = 256 * self.splits.setdefault(shape, max(1, -(-p.max_kv_len // 256)))

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start, min(end, run.room)


@wrong(
    mla_of,
    trigger=("no sinks, and a request with fewer keys than rows, but one at least (padding of a CUDA graph)"),
)
class Blind192(Kernel):
    """Masked logits are -1e30, not minus infinity: a row that sees no key gives the mean of all."""

    def mask_scores(self, run, r, s, first_key):
        return s.clamp(min=-1e30)


@wrong(mla_of, trigger="an e4m3 query with an LSE")
class Blind193(Kernel):
    """For an e4m3 query the weights are 256 times as large, and the LSE is that of their sum."""

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out, lse + 8 if run.query.dtype == E4M3 else lse
