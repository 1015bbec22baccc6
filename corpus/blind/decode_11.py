"""Wrong kernels of the decode call, written without a look at the checks: numbers 509 to 540."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, Memory, decode_of, index
from lab.references.quantization import dequantize_nvfp4


@wrong(decode_of, trigger="sinks, an LSE, and a row that sees no key (no keys, or fewer keys than rows)")
class Blind509(Kernel):
    """The LSE of a row that sees no key is its sink as it is, not times log2(e)."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if sinks is not None:
            lse = torch.where(seen.any(1)[:, None], lse, sinks.to(lse.dtype))
        return out, lse


@wrong(decode_of, trigger="both tensors given, and not the same scale")
class Blind510(Kernel):
    """A bmm1_scale that is a tensor is taken before bmm1_scale_log2, which has precedence."""

    def start(self, run):
        super().start(run)
        if run.call.bmm1_scale_log2 is not None and isinstance(run.call.bmm1_scale, torch.Tensor):
            run.scale1 = float(run.call.bmm1_scale)


SPLIT, LANES = 512, 32


class Blind531Model(Kernel):
    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (keys < SPLIT * LANES)


trtllm_batch_decode_with_kv_cache_531 = decode_of(Blind531Model())


@wrong(trigger="more than 16,384 keys that a row sees beyond key 16,384")
class Blind531:
    """The merge of the split results has one lane of a warp per split of 512 keys: splits from the 33rd on are not
    merged.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_531)


SPLIT_532 = 512


class Blind532Model(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = len(keys)
        if n <= SPLIT_532 or run.query.dtype != torch.float16:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        partials = []
        for a in range(0, n, SPLIT_532):
            cut = slice(a, min(a + SPLIT_532, n))
            acc, largest, total = self.partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + a)
            partials.append((acc.to(torch.float16).to(acc.dtype), largest, total))
        return self.finish(run, self.merge(partials), sinks)


trtllm_batch_decode_with_kv_cache_532 = decode_of(Blind532Model())


@wrong(
    trigger=(
        "float16 query, more than 512 keys of a request seen, a split's unnormalised sum of P·V above 65,504 "
        "(near-uniform weights, V with a mean of 200)"
    ),
)
class Blind532:
    """Split results go to the workspace unnormalised and, for a float16 query, as float16: sums of large V overflow
    there.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_532)


@wrong(decode_of, trigger="a second call on the same block_tables tensor with other contents and unchanged seq_lens")
class Blind533(Kernel):
    """A plan holds the page table and is made anew only if the lengths have changed: a table rewritten under the same
    lengths is not read.
    """

    def __init__(self):
        self.plans = Memory()

    def start(self, run):
        super().start(run)
        table = run.call.block_tables
        plan = self.plans.of(table, dict)
        if plan.get("lens") != run.lens:
            plan.update(lens=list(run.lens), k=run.k_table.clone(), v=run.v_table.clone())
        run.k_table, run.v_table = plan["k"], plan["v"]

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, run.k_cache.shape[0] - 1)


SPLIT, SMS = 128, 132


class Blind534Model(Kernel):
    def start(self, run):
        super().start(run)
        room = run.batch + 2 * SMS
        run.items = []
        for length in run.lens:
            run.items.append(min(-(-length // SPLIT), room))
            room -= run.items[-1]

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (keys < run.items[r] * SPLIT)


trtllm_batch_decode_with_kv_cache_534 = decode_of(Blind534Model())


@wrong(trigger="sum over requests of ceil(len/128) above batch + 264")
class Blind534:
    """The list of work items (request, 128 keys) has room for two per SM and one per request; items beyond are
    dropped.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_534)


TILE_535 = 64


class Blind535Model(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (start // TILE_535 * TILE_535 if run.shown is not None else start), end

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.shown is None or run.window < 0:
            return seen
        draft = run.lens[r] - run.shown.shape[1]
        before = (keys // TILE_535 + 1) * TILE_535 <= draft
        first = (position.min() - run.window).clamp(min=0) // TILE_535
        return torch.where(before, keys // TILE_535 >= first, seen)


trtllm_batch_decode_with_kv_cache_535 = decode_of(Blind535Model())


@wrong(
    trigger=(
        "mask and window_left, where the window of a row begins inside a tile of 64 keys that ends before the draft"
    ),
)
class Blind535:
    """With a draft mask, tiles of 64 keys wholly before the draft take the path without masking: of a window they
    honour whole tiles only.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_535)


TILE_536 = 64


class Blind536Model(Kernel):
    def rows(self, run, r, start, stop):
        run.row_of_chunk = torch.arange(start, stop) - run.offsets[r]
        super().rows(run, r, start, stop)

    def mask_scores(self, run, r, s, first_key):
        _, _, g, n = s.shape
        if run.shown is not None or not n:
            return s
        packed = run.row_of_chunk.unsqueeze(1) * g + torch.arange(g)
        token = packed // TILE_536 * TILE_536 // g + packed % TILE_536 // g
        position = self.positions(run, r, token)
        keys = first_key + torch.arange(n)
        return s.masked_fill(keys > position.unsqueeze(2), -math.inf)


trtllm_batch_decode_with_kv_cache_536 = decode_of(Blind536Model())


@wrong(trigger="no mask, q_len * group above 64, and group (heads per K/V head) does not divide 64")
class Blind536:
    """Rows and heads of a group are packed in tiles of 64; a packed row's token counts from the tile's first token, as
    if tiles began with a head 0.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_536)


@wrong(decode_of, trigger="page id times page stride reaches 4 GiB (strided cache)")
class Blind537(Kernel):
    """A page's offset in bytes, page times stride, is computed in 32 bits without sign: it wraps at 4 GiB."""

    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        step = cache.stride(0) * cache.element_size()
        if cache.dtype == torch.uint8 or not len(pages) or int(pages.max()) * step < 2**32:
            return super().entries(run, side, pages, cut)
        at = (pages * step % 2**32 // cache.element_size()).tolist()
        origin = cache.storage_offset()
        got = [torch.as_strided(cache, cache.shape[1:], cache.stride()[1:], origin + a).to(run.dtype) for a in at]
        return torch.stack(got).transpose(1, 2).flatten(0, 1)[cut]


@wrong(decode_of, trigger="NVFP4 cache with uses_shared_paged_kv_idx=False, V's pages other than K's")
class Blind538(Kernel):
    """The scale factors of an NVFP4 V cache are found by K's page ids, also where V has a page table of its own."""

    def entries(self, run, side, pages, cut):
        if run.k_cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        if side == "k":
            run.factor_pages = pages
            return super().entries(run, side, pages, cut)
        got = dequantize_nvfp4(index(run.v_cache, pages), index(run.v_factors, run.factor_pages))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


@wrong(decode_of, trigger="bmm1_scale_log2 together with finite sinks")
class Blind539(Kernel):
    """Sinks are multiplied by log2(e) where the host folds it into the scale; with bmm1_scale_log2 they stay as they
    are in the base-2 softmax.
    """

    def start(self, run):
        super().start(run)
        if run.sinks is not None and run.call.bmm1_scale_log2 is not None:
            run.sinks = run.sinks * math.log(2.0)


TILE_540 = 16


class Blind540Model(Kernel):
    def solve(self, run):
        if run.call.cum_seq_lens_q is None:
            return super().solve(run)
        self.start(run)
        end = run.offsets[-1]
        run.out[end:] = 0
        if run.lse is not None:
            run.lse[end:] = -math.inf
        for r in sorted(range(run.batch), key=lambda r: -run.lens[r]):
            self.request(run, r)
            first, last = run.offsets[r : r + 2]
            spare = min(first + -(-(last - first) // TILE_540) * TILE_540, end)
            if last < spare:
                self.rows(run, r, last, spare)


trtllm_batch_decode_with_kv_cache_540 = decode_of(Blind540Model())


@wrong(
    trigger=(
        "cum_seq_lens_q, a request whose rows are no multiple of 16, followed within its tile by a request with "
        "more keys"
    ),
)
class Blind540:
    """Ragged rows are stored in whole tiles of 16, longest requests first: a tile's spare rows overwrite rows of the
    next request if it ran before.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_540)
