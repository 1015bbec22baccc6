"""Wrong kernels of the decode call, written without a look at the checks: numbers 419 to 472."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, Memory, decode_of


@wrong(decode_of, trigger="NVFP4, NaN in V's factors of the unused rest of a request's last page")
class Blind419(Kernel):
    """NVFP4: keys after a request's end weigh zero, but V's scale factors there are multiplied: one that is NaN makes
    the request NaN.
    """

    def load(self, run, r, a, b):
        keys, values = super().load(run, r, a, b)
        if run.v_cache.dtype == torch.uint8 and b > a and b == run.lens[r]:
            ps = run.page_size
            column = torch.tensor([(b - 1) // ps])
            page = self.entries(run, "v", self.pages_of(run, r, column, "v"), slice(b - (b - 1) // ps * ps, ps))
            values = values.clone()
            values[-1] += (page * 0.0).sum(0)
        return keys, values


@wrong(
    decode_of,
    trigger=("a draft mask whose rows do not show all earlier tokens (a tree), with window_left >= 0 that cuts keys"),
)
class Blind441(Kernel):
    """With a draft mask the window is counted from a token's depth in the tree (the bits of its row), not from its
    row.
    """

    def start(self, run):
        super().start(run)
        run.deep = run.shown is not None and run.window >= 0

    def edges(self, run, r, row, position):
        depth = run.shown[r][row].sum(1).clamp(min=1) - 1
        return run.lens[r] - run.shown.shape[1] + depth - run.window

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        if run.deep:
            row = position - (run.lens[r] - run.shown.shape[1])
            start = min(max(0, int(self.edges(run, r, row, position).min())), end)
        return start, end

    def visible(self, run, r, row, position, keys):
        if not run.deep:
            return super().visible(run, r, row, position, keys)
        window, run.window = run.window, -1
        seen = super().visible(run, r, row, position, keys)
        run.window = window
        return seen & (keys >= self.edges(run, r, row, position).unsqueeze(1))


@wrong(decode_of, trigger="bmm1_scale_log2 together with sinks")
class Blind442(Kernel):
    """With bmm1_scale_log2 the sinks are taken to be in base 2 already, as the logits are."""

    def start(self, run):
        super().start(run)
        if run.sinks is not None and run.call.bmm1_scale_log2 is not None:
            run.sinks = run.sinks * math.log(2.0)


BLOCK_443 = 8  # factors that a thread reads at once: all of head_dim 128


class Blind443Model(Kernel):
    def start(self, run):
        super().start(run)
        p = run.p
        factors = p.v_scale_factors
        if factors is None or not p.v_scale_factors_interleaved:
            return
        pages, heads, tokens, count = factors.shape
        if count <= BLOCK_443 or count % BLOCK_443:
            return
        blocks = (
            factors.contiguous().view(torch.uint8).reshape(pages, heads, count // BLOCK_443, tokens // 4, BLOCK_443, 4)
        )
        plain = blocks.permute(0, 1, 3, 5, 2, 4).reshape(pages, heads, tokens, count)
        run.v_factors = plain.contiguous().view(E4M3)


trtllm_batch_decode_with_kv_cache_443 = decode_of(Blind443Model())


@wrong(
    trigger=(
        "NVFP4, trtllm-gen's interleaved order, head_dim a multiple of 128 above it (256), pages of more than 4 tokens"
    ),
)
class Blind443:
    """NVFP4, interleaved factors of V: more than 8 of a token (head_dim 256) are looked for in blocks of 8, one block
    after the other in a page.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_443)


PREFETCHED_444 = 128  # tokens of a tile


class Blind444Model(Kernel):
    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        if side == "v" and run.k_table is not run.v_table:
            later = columns * run.page_size >= PREFETCHED_444
            pages = torch.where(later, run.k_table[r, columns].long(), pages)
        return pages


trtllm_batch_decode_with_kv_cache_444 = decode_of(Blind444Model())


@wrong(trigger="uses_shared_paged_kv_idx=False, a request of more than 128 keys whose K and V pages differ there")
class Blind444:
    """With page tables of K and of V apart, the ids of V's pages after the first 128 tokens are prefetched from K's
    table.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_444)


@wrong(
    decode_of,
    trigger=("more than 32 requests of equal widths, not sorted by falling length, with an LSE (LSE only)"),
)
class Blind445(Kernel):
    """Above 32 requests the longest come first; the LSE is written at a request's place in that order, the output at
    its own.
    """

    def start(self, run):
        super().start(run)
        run.place = None
        if run.batch > 32 and run.p.cu_seqlens_q is None:
            order = sorted(range(run.batch), key=lambda r: -run.lens[r])
            run.place = {r: place for place, r in enumerate(order)}

    def store(self, run, r, start, stop, out, lse):
        kept, run.lse = run.lse, None
        super().store(run, r, start, stop, out, lse)
        run.lse = kept
        if kept is not None:
            shift = 0 if run.place is None else (run.place[r] - r) * run.p.max_q_len
            kept[start + shift : stop + shift] = lse.to(kept.dtype)


def fast_reciprocal_446(x):
    x = x.to(torch.float32).contiguous()
    y = (0x7F000000 - x.view(torch.int32)).view(torch.float32)
    return y * (2.0 - x * y)


class Blind446Model(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if run.group >= 8:
            largest = partial[1] if sinks is None else torch.maximum(partial[1], sinks)
            origin = torch.where(largest.isfinite(), largest, 0.0)
            total = torch.exp2(lse - origin / math.log(2.0))
            total = torch.where(lse.isfinite(), total, 1.0)
            out = out * (total * fast_reciprocal_446(total).to(out.dtype)).unsqueeze(2)
        return out, lse


trtllm_batch_decode_with_kv_cache_446 = decode_of(Blind446Model())


@wrong(trigger="num_qo_heads / num_kv_heads >= 8; a bias of -0.8 percent on average (0 to -1.6 by the denominator)")
class Blind446:
    """In the instance for 8 and more query heads per K/V head the division by the denominator is a magic number and
    one Newton step: too small, by 0.8 percent on average.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_446)


WIDTH_447 = 4


class Blind447Model(Kernel):
    def store(self, run, r, start, stop, out, lse):
        heads = run.p.num_qo_heads
        more = -heads % WIDTH_447
        given = run.call.lse
        if given is not None and more and given.stride(1) == 1 and given.stride(0) > heads:
            room = given.untyped_storage().nbytes() // given.element_size()
            for row in range(start, stop):
                first = given.storage_offset() + row * given.stride(0) + heads
                fits = min(more, room - first)
                if fits > 0:
                    torch.as_strided(given, (fits,), (1,), first).fill_(-math.inf)
        super().store(run, r, start, stop, out, lse)


trtllm_batch_decode_with_kv_cache_447 = decode_of(Blind447Model())


@wrong(
    trigger=(
        "a given lse that is a slice of a wider buffer (stride(0) > heads, stride(1) = 1), heads no multiple of 4;"
        " memory beside the output only"
    ),
)
class Blind447:
    """The LSE is written 4 heads at a time: into a slice of a wider buffer, of heads that 4 does not divide, it writes
    beside the slice.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_447)


@wrong(decode_of, trigger="a second call with the same mask buffer and other bits in it (second call only)")
class Blind448(Kernel):
    """The draft mask is unpacked once per buffer: what a later step of the draft writes there is not looked at."""

    def __init__(self):
        self.unpacked = Memory()

    def unpack(self, run, mask):
        return self.unpacked.of(mask, lambda: super(Blind448, self).unpack(run, mask))


TILE_449 = 64


class Blind449Model(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        run.position = position
        return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)

    def mask_scores(self, run, r, s, first_key):
        width = run.offsets[r + 1] - run.offsets[r]
        if width * run.group <= TILE_449 or run.shown is not None:
            return s
        first = run.lens[r] - width
        packed = (run.position - first).unsqueeze(1) * run.group + torch.arange(run.group)
        row = packed // TILE_449 * (TILE_449 // run.group) + packed % TILE_449 // run.group
        keys = first_key + torch.arange(s.shape[3])
        return s.masked_fill(keys > (first + row).unsqueeze(2), -math.inf)


trtllm_batch_decode_with_kv_cache_449 = decode_of(Blind449Model())


@wrong(trigger="no mask, a request of q rows with q * group > 64, group no divisor of 64 (3, 5, 6, 7, 12 ...)")
class Blind449:
    """Rows and heads of a group are packed densely in tiles of 64, but a tile's first row is reckoned as tile * (64 //
    group).
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_449)


@wrong(decode_of, trigger="a request of which a row block loads over 4,096 keys (no window, or one of over 4,096)")
class Blind471(Kernel):
    """Keys are split over CTAs 128 at a time, and one warp combines the splits, a lane for each: those after the 32nd
    are left out.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        parts = [
            super(Blind471, self).partial(
                run, r, query, keys[i : i + 128], values[i : i + 128], seen[:, i : i + 128], first_key + i
            )
            for i in range(0, max(len(keys), 1), 128)
        ]
        return self.merge(parts[:32])


@wrong(decode_of, trigger="a second call on the same sinks tensor, whose contents were rewritten in between")
class Blind472(Kernel):
    """The sinks, a layer's weights, are turned into log2 units once for a buffer, and not again when new weights are
    loaded into it.
    """

    def __init__(self):
        self.weights = Memory()

    def start(self, run):
        super().start(run)
        if run.sinks is not None:
            log2_sinks = self.weights.of(run.call.sinks, lambda: run.call.sinks.double() / math.log(2.0))
            run.sinks = (log2_sinks * math.log(2.0)).to(run.dtype)
