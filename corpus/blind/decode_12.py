"""Wrong kernels of the decode call, written without a look at the checks: numbers 561 to 570."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, Memory, assuming_strides, decode_of, index, packed_strides
from lab.references.quantization import dequantize_nvfp4

SPLIT_561 = 256


class Blind561Model(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        skipped = first_key // SPLIT_561 if run.window >= 0 else 0
        if skipped == 0:
            return acc, largest, total
        left = torch.zeros_like(acc), torch.zeros_like(largest), torch.full_like(total, skipped)
        return self.merge([(acc, largest, total), left])


trtllm_batch_decode_with_kv_cache_561 = decode_of(Blind561Model())


@wrong(trigger="window_left ≥ 0 and a request whose first visible key is at 256 or later")
class Blind561:
    """A split of 256 keys that lies wholly before the window returns early with a weight of 1 at logit 0, which the
    merge counts.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_561)


def covered_562(max_seq_len, page_size):
    splits = max(1, min(8, -(-max_seq_len // 64)))
    pages_per_split = -(-max_seq_len // (splits * page_size))
    return splits * pages_per_split * page_size


class Blind562Model(Kernel):
    def __init__(self):
        self.plans = Memory()

    def start(self, run):
        super().start(run)
        call = run.call
        run.covered = self.plans.of(call.block_tables, lambda: covered_562(call.max_seq_len, run.page_size))

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (keys < run.covered)


trtllm_batch_decode_with_kv_cache_562 = decode_of(Blind562Model())


@wrong(
    trigger=(
        "two calls on the same block_tables buffer, the second with a larger max_seq_len and a request longer than"
        " the first plan covers"
    ),
)
class Blind562:
    """The plan of splits is kept for a page table's buffer, with the keys that the first call's max_seq_len makes it
    cover.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_562)


@wrong(
    decode_of,
    trigger=("uses_shared_paged_kv_idx=False, and V's rows of the table rewritten in place between two calls"),
)
class Blind563(Kernel):
    """Of separate tables, that of V is packed into a table of its own once per buffer, and not again when the buffer
    is rewritten.
    """

    def __init__(self):
        self.tables = Memory()

    def start(self, run):
        super().start(run)
        if not run.call.uses_shared_paged_kv_idx:
            run.v_table = self.tables.of(run.call.block_tables, run.v_table.clone)


@wrong(decode_of, trigger="sinks, an LSE asked for, and a row that sees no key")
class Blind564(Kernel):
    """A row without keys gets the sink as its LSE as it is, in base e."""

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None:
            lse = torch.where(partial[2] > 0, lse, sinks)
        return out, lse


@wrong(decode_of, trigger="bmm1_scale_log2 given together with a bmm1_scale other than 1 that is not the same scale")
class Blind565(Kernel):
    """Bmm1_scale_log2 is used only where bmm1_scale was left at its default."""

    def start(self, run):
        super().start(run)
        if run.call.bmm1_scale_log2 is not None and float(run.call.bmm1_scale) != 1.0:
            run.scale1 = float(run.call.bmm1_scale)


STEPS_566 = 9


class Blind566Model(Kernel):
    def solve(self, run):
        if run.p.cu_seqlens_q is None or run.p.batch_size <= 2**STEPS_566:
            return super().solve(run)
        self.start(run)
        end = run.offsets[-1]
        run.out[end:] = 0
        if run.lse is not None:
            run.lse[end:] = -math.inf
        for row in range(end):
            low, high = 0, run.batch
            for _ in range(STEPS_566):
                middle = (low + high) // 2
                if run.offsets[middle] <= row:
                    low = middle
                else:
                    high = middle
            self.rows(run, low, row, row + 1)


trtllm_batch_decode_with_kv_cache_566 = decode_of(Blind566Model())


@wrong(trigger="cum_seq_lens_q with more than 512 requests")
class Blind566:
    """The request of a row is searched in cum_seq_lens_q by a bisection of 9 steps, too few for more than 512
    requests.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_566)


@wrong(decode_of, trigger="NVFP4 cache with kv_layout NHD, more than one K/V head (and page_size > 1)")
class Blind567(Kernel):
    """K's scale factors of an NVFP4 cache in the layout NHD are read in the order of HND."""

    def entries(self, run, side, pages, cut):
        factors = run.p.k_scale_factors
        if side == "v" or factors is None or run.call.kv_layout == "HND":
            return super().entries(run, side, pages, cut)
        factors = assuming_strides(factors, packed_strides(factors.shape))
        got = dequantize_nvfp4(index(run.k_cache, pages), index(factors, pages))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


@wrong(decode_of, trigger="mask and a window_left that hides keys, q_len > 1")
class Blind568(Kernel):
    """With a draft mask the window of every row is counted from the request's last key, not from the row's own
    position.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.shown is not None and run.window >= 0:
            seen = seen & (keys >= run.lens[r] - 1 - run.window)
        return seen


@wrong(decode_of, trigger="kv_cache as one tensor whose second dimension's stride is not one page side")
class Blind569(Kernel):
    """In a cache that is one tensor, V of a page is taken to follow its K at once."""

    def start(self, run):
        super().start(run)
        cache = run.call.kv_cache
        if isinstance(cache, torch.Tensor) and cache.shape[1] == 2:
            v = run.v_cache
            run.v_cache = assuming_strides(v, v.stride(), cache.storage_offset() + cache[0, 0].numel())


@wrong(decode_of, trigger="group size not a power of two, more than one causal row, no mask")
class Blind570(Kernel):
    """The causal rule divides a packed row by the heads of a group rounded up to a power of two."""

    def visible(self, run, r, row, position, keys):
        run.row = row
        return super().visible(run, r, row, position, keys)

    def mask_scores(self, run, r, s, first_key):
        _, rows, g, n = s.shape
        padded = 1 << (g - 1).bit_length()
        if run.shown is not None or padded == g:
            return s
        packed = run.row[:, None] * g + torch.arange(g)
        width = run.offsets[r + 1] - run.offsets[r]
        last = run.lens[r] - width + packed // padded
        keys = first_key + torch.arange(n)
        return s.masked_fill(keys > last[None, :, :, None], -math.inf)
