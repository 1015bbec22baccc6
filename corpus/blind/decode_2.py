"""Wrong kernels of the decode call, written without a look at the checks: numbers 16 to 74."""

import math
import random

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, assuming_strides, decode_of, packed_strides
from lab.references.quantization import deinterleave_v_scale_factors


@wrong(decode_of, trigger="kv_cache as one tensor with a second dimension of 1")
class Blind16(Kernel):
    """Of a one-tensor cache V is found stride(1) after K: where the second dimension is 1 (K is V), that is the next
    page.
    """

    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        cache = run.call.kv_cache
        if side == "v" and isinstance(cache, torch.Tensor) and cache.shape[1] == 1:
            pages = (pages + 1) % cache.shape[0]
        return pages


@wrong(decode_of, trigger="query whose rows or heads are strided, e.g. a slice of a fused QKV tensor")
class Blind17(Kernel):
    """The query's rows are taken to lie end to end: a strided query (a part of a fused QKV) is read from the wrong
    places.
    """

    def start(self, run):
        super().start(run)
        run.query = assuming_strides(run.query, packed_strides(run.query.shape))


@wrong(decode_of, trigger="a group that is no power of two (3, 5, 6, 7) with num_kv_heads > 1")
class Blind18(Kernel):
    """The K/V head of a query head is h >> log2(group), rounded up: groups that are no power of two read other heads."""

    def start(self, run):
        super().start(run)
        if run.group & (run.group - 1):
            shift = (run.group - 1).bit_length()
            run.head_map = torch.arange(run.p.num_qo_heads) >> shift


@wrong(decode_of, trigger="mask with q_len_per_req > 16")
class Blind19(Kernel):
    """Of a draft mask's row only word 0 is loaded, and indexed with b % 16: draft tokens after the 16th follow the
    bits of the first 16.
    """

    def unpack(self, run, mask):
        q_len = mask.shape[1]
        return super().unpack(run, mask)[:, :, torch.arange(q_len) % 16]


@wrong(decode_of, trigger="every call with a bfloat16 query: slope 0.995; float16 is right")
class Blind20(Kernel):
    """Weights and outputs are packed to bfloat16 by truncation (cvt.rz), not rounded: everything is about half a
    percent too small.
    """

    @staticmethod
    def truncated(x):
        return (x.to(torch.float32).view(torch.int32) & -65536).view(torch.float32)

    def operand(self, run, weights):
        return (
            self.truncated(weights) if run.p.query.dtype == torch.bfloat16 and run.dtype == torch.float32 else weights
        )

    def store(self, run, r, start, stop, out, lse):
        if run.out.dtype == torch.bfloat16 and run.dtype == torch.float32:
            out = self.truncated(out)
        super().store(run, r, start, stop, out, lse)


@wrong(decode_of, trigger="a pool of more than 65,536 pages, and a live page id of 65,536 or more")
class Blind61(Kernel):
    """Page ids are packed in 16 bits on their way to shared memory: those from 65,536 on lose their upper part."""

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side) & 0xFFFF


@wrong(decode_of, trigger="NaN or infinity in V after the last token of a request, in its last page")
class Blind62(Kernel):
    """The last page is multiplied whole, with weights of zero after the request's end: NaN or infinity in V's unused
    tokens comes through.
    """

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        end, ps = run.lens[r], run.page_size
        if end % ps:
            page = self.pages_of(run, r, torch.tensor([end // ps]), "v")
            tail = self.entries(run, "v", page, slice(end % ps, None))
            out = out + (0.0 * tail).sum(0).repeat_interleave(run.group, 0)
        return out, lse


@wrong(
    decode_of,
    trigger=(
        "every call with a query of 16 bits or more and a bmm1_scale other than 1: the query has changed, and a "
        "second call on it is wrong"
    ),
)
class Blind63(Kernel):
    """The query is multiplied by bmm1_scale in place, in the caller's memory: the call is right, a second one on the
    same query is not.
    """

    def start(self, run):
        super().start(run)
        if run.query.dtype != E4M3:
            run.query.mul_(run.scale1)
            run.scale1 = 1.0


@wrong(
    decode_of,
    trigger=(
        "out given as the first part of a larger buffer, with rows that are no multiple of 16: what follows out "
        "(up to 15 rows) is zeroed"
    ),
)
class Blind64(Kernel):
    """Rows are stored in tiles of 16 whole ones: zeros go after out's end where the rows are no multiple of 16."""

    def paged(self, call):
        result = super().paged(call)
        if call.out is not None and call.out.numel():
            out, row = call.out, call.out[0].numel()
            after = out.storage_offset() + out.numel()
            room = out.untyped_storage().nbytes() // out.element_size() - after
            count = min(-out.shape[0] % 16 * row, room)
            if count > 0:
                torch.as_strided(out, (count,), (1,), after).copy_(torch.zeros(count, dtype=out.dtype))
        return result


@wrong(
    decode_of,
    trigger=("lse given as a tensor that is not contiguous (a column slice of a wider buffer, or transposed)"),
)
class Blind65(Kernel):
    """A given lse is written as if its rows lay end to end: of a strided one the values go to the wrong places."""

    def start(self, run):
        super().start(run)
        if run.lse is not None:
            run.lse = assuming_strides(run.lse, packed_strides(run.lse.shape))


@wrong(decode_of, trigger="sinks and an LSE with a request of seq_lens 0; only the LSE of its rows is wrong")
class Blind66(Kernel):
    """A request without keys returns early, with an LSE of minus infinity: its sinks are forgotten."""

    def request(self, run, r):
        if run.lens[r]:
            super().request(run, r)
            return
        rows = slice(*run.offsets[r : r + 2])
        run.out[rows] = 0
        if run.lse is not None:
            run.lse[rows] = -math.inf


@wrong(
    decode_of,
    trigger=("e4m3 kv_cache with many entries below 1/64, such as a V of small values with a large bmm2_scale"),
)
class Blind67(Kernel):
    """The conversion of an e4m3 cache to 16 bits flushes subnormals (magnitudes below 2^-6) to zero."""

    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        cache = run.k_cache if side == "k" else run.v_cache
        return torch.where(got.abs() < 2.0**-6, 0.0, got) if cache.dtype == E4M3 else got


@wrong(decode_of, trigger="NVFP4 kv_cache with kv_layout='NHD', and more than one K/V head and token of a page")
class Blind68(Kernel):
    """V's NVFP4 scale factors are always addressed as HND: with NHD the factors of other tokens and heads are taken."""

    def start(self, run):
        super().start(run)
        factors = run.p.v_scale_factors
        if factors is not None and run.call.kv_layout == "NHD":
            as_stored = factors.view(torch.uint8).transpose(1, 2)  # [pages, page_size, heads, factors]
            taken = as_stored.reshape(factors.shape)
            if run.p.v_scale_factors_interleaved:
                taken = deinterleave_v_scale_factors(taken)
            run.v_factors = taken.view(E4M3)


@wrong(decode_of, trigger="kv_layout='NHD' with a page_size equal to num_kv_heads")
class Blind69(Kernel):
    """The layout is told by the cache's shape, not by kv_layout: where page_size is num_kv_heads, NHD is read as HND."""

    def start(self, run):
        super().start(run)
        alike = run.page_size == run.num_kv_heads and run.p.k_scale_factors is None
        if run.call.kv_layout == "NHD" and alike:
            run.k_cache, run.v_cache = run.k_cache.transpose(1, 2), run.v_cache.transpose(1, 2)


@wrong(
    decode_of,
    trigger=(
        "batch over 256, and a request after the 256th that needs more tiles of 64 keys than all of the first 256"
    ),
)
class Blind70(Kernel):
    """One block of 256 threads takes the longest of the first 256 requests for the number of key tiles (64 keys) of
    all: longer later ones are cut off.
    """

    def start(self, run):
        super().start(run)
        run.most = -(-max(run.lens[:256], default=0) // 64) * 64

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (keys < run.most)


@wrong(decode_of, trigger="mask with a bit set for a draft token after the row's own (not lower triangular)")
class Blind71(Kernel):
    """The draft mask is applied on top of the causal one: a bit that shows a later draft token to a row is ignored."""

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return seen if run.shown is None else seen & (keys <= position.unsqueeze(1))


@wrong(decode_of, trigger="bmm1_scale the number 0 (without bmm1_scale_log2): all visible keys have the same weight")
class Blind72(Kernel):
    """The wrapper writes `bmm1_scale or head_dim ** -0.5`: a scale of 0 becomes the default one."""

    def start(self, run):
        super().start(run)
        if run.scale1 == 0 and not isinstance(run.p.bmm1_scale, torch.Tensor):
            run.scale1 = run.p.head_dim**-0.5


@wrong(decode_of, trigger="window_left=0")
class Blind73(Kernel):
    """The window is on if window_left > 0: with 0, the row's own key alone, every key is seen."""

    def start(self, run):
        super().start(run)
        if run.window == 0:
            run.window = -1


@wrong(decode_of, trigger="requests of more than 512 keys: wrong in some calls, right in others")
class Blind74(Kernel):
    """The merge of splits (512 keys) lacks a fence: about one request in five comes out without its last split,
    another one in each call.
    """

    SPLIT = 512
    race = random.Random()

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        partials = []
        for at in range(0, len(keys), self.SPLIT):
            part = slice(at, at + self.SPLIT)
            partials.append(self.partial(run, r, query, keys[part], values[part], seen[:, part], first_key + at))
        if len(partials) < 2:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if self.race.random() < 0.2:
            partials.pop()
        return self.finish(run, self.merge(partials), sinks)
