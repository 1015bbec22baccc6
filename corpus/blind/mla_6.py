"""Wrong kernels of MLA decode, written without a look at the checks: numbers 550 to 581."""

import math
from types import SimpleNamespace

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, assuming_strides, mla_of


@wrong(
    mla_of,
    trigger=("cum_seq_lens_q with unequal widths and padding rows, so that the query has batch_size * max_q_len rows"),
)
class Blind550(Kernel):
    """Rows are taken to be uniform if the query has batch_size * max_q_len of them, also where the last are padding
    after ragged requests.
    """

    def start(self, run):
        super().start(run)
        p = run.p
        if p.cu_seqlens_q is not None and p.num_rows == run.batch * p.max_q_len:
            run.offsets = list(range(0, p.num_rows + 1, p.max_q_len)) if p.max_q_len else run.offsets


SPLIT_551 = 256


class Blind551Model(Kernel):
    def store(self, run, r, start, stop, out, lse):
        super().store(run, r, start, stop, out, lse)
        buffer, splits = run.call.multi_ctas_kv_counter_buffer, -(-run.lens[r] // SPLIT_551)
        if buffer is None or splits <= 1 or buffer.numel() * buffer.element_size() < 4 * run.p.num_rows:
            return
        counters = buffer.flatten().view(torch.uint8)[: 4 * run.p.num_rows].view(torch.int32)
        for row in range(start, stop):
            merged = int(counters[row]) == 0
            counters[row] += splits
            if not merged:
                run.out[row] = 0
                if run.lse is not None:
                    run.lse[row] = -math.inf
            if row == run.offsets[r]:
                counters[row] = 0


trtllm_batch_decode_with_kv_cache_mla_551 = mla_of(Blind551Model())


@wrong(
    trigger=(
        "a second call with the same multi_ctas_kv_counter_buffer, several rows of a request of more than 256 keys"
    ),
)
class Blind551:
    """CTAs that share a row count in the given counters, one per row, and reset those of each request's first row
    alone: the next call's other rows are not merged.
    """

    trtllm_batch_decode_with_kv_cache_mla = staticmethod(trtllm_batch_decode_with_kv_cache_mla_551)


@wrong(mla_of, trigger="cum_seq_lens_q without max_q_len, and a request wider than the mean, rounded up")
class Blind577(Kernel):
    """Without max_q_len, requests of different widths are given the mean number of rows, rounded up, and rows beyond
    it are zero.
    """

    def request(self, run, r):
        call = run.call
        first, last = run.offsets[r : r + 2]
        if call.cum_seq_lens_q is None or call.max_q_len is not None or first == last:
            return super().request(run, r)
        end = min(last, first + -(-run.p.num_rows // run.batch))
        self.rows(run, r, first, end)
        run.out[end:last] = 0
        if run.lse is not None:
            run.lse[end:last] = -math.inf


@wrong(mla_of, trigger="more than 64 heads with sinks that differ")
class Blind578(Kernel):
    """In tiles of 64 heads, each tile reads the sinks of the first."""

    def sink_rows(self, run, r, position):
        if run.sinks is None:
            return None
        return run.sinks[torch.arange(len(run.sinks)) % 64].expand(len(position), -1)


@wrong(mla_of, trigger="lse given with return_lse_base='basee'")
class Blind579(Kernel):
    """An LSE in base e is converted into a new tensor: a given lse stays in base 2."""

    def mla(self, call):
        problem = call.problem()
        out, lse = problem.results()
        run = SimpleNamespace(call=call, p=problem, out=out, lse=lse)
        if problem.num_rows:
            self.solve(run)
        if lse is not None and call.return_lse_base == "basee":
            lse = lse * math.log(2.0)
        return call.returned(out, lse)


@wrong(mla_of, trigger="kv_cache with gaps between its pages (one layer of a pool [pages, layers, ...])")
class Blind580(Kernel):
    """The pages of a cache are taken to follow each other, page_size tokens apart."""

    def start(self, run):
        super().start(run)

        def packed(cache):
            strides = list(cache.stride())
            strides[0] = run.page_size * strides[2]
            return assuming_strides(cache, strides)

        run.k_cache, run.v_cache = packed(run.k_cache), packed(run.v_cache)


SPLIT, LANES = 128, 32


class Blind581Model(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        splits = -(-len(keys) // SPLIT)
        if splits <= LANES:
            return acc, largest, total
        cut = slice((splits - LANES) * SPLIT, None)
        _, last, kept = super().partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + cut.start)
        origin = torch.where(largest.isfinite(), largest, 0.0)
        return acc, largest, kept * torch.where(last.isfinite(), torch.exp(last - origin), 0.0)


trtllm_batch_decode_with_kv_cache_mla_581 = mla_of(Blind581Model())


@wrong(trigger="a request of more than 4,096 keys")
class Blind581:
    """32 lanes merge splits of 128 keys; a lane with several splits adds up their accumulators, but keeps the sum of
    weights of its last alone.
    """

    trtllm_batch_decode_with_kv_cache_mla = staticmethod(trtllm_batch_decode_with_kv_cache_mla_581)
