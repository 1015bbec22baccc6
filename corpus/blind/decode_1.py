"""Wrong kernels of the decode call, written without a look at the checks: numbers 1 to 15."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, Memory, decode_of


@wrong(decode_of, trigger="a decode request (its window, if any) of more than 16,384 keys")
class Blind1(Kernel):
    """64 splits of 256 keys are launched for a request, whatever its length: keys after the 64th split are not read."""

    SPLIT, MOST = 256, 64

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = self.SPLIT * self.MOST
        return super().attend(run, r, query, keys[:n], values[:n], seen[:, :n], sinks, position, first_key)


@wrong(
    decode_of,
    trigger=(
        "a request with more than 1,024 live page-table columns in view (page 16: over 16,384 keys; page 1: over 1,024)"
    ),
)
class Blind2(Kernel):
    """A request's page ids are staged in shared memory with room for 1,024 of them, as a ring: later columns wrap
    around.
    """

    def pages_of(self, run, r, columns, side):
        if len(columns) > 1024:
            columns = columns % 1024
        return super().pages_of(run, r, columns, side)


@wrong(decode_of, trigger="4,096 <= window_left < max_seq_len and a row at position 4,096 or later")
class Blind3(Kernel):
    """A windowed row walks at most 64 tiles of 64 keys: of a wider window it sees the newest 4,096 keys."""

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.window >= 0:
            seen = seen & (keys > position.unsqueeze(1) - 64 * 64)
        return seen


@wrong(
    decode_of,
    trigger=("a second call with the same seq_lens buffer after its contents changed (lengths that grow)"),
)
class Blind4(Kernel):
    """The lengths are read to the host once for a seq_lens buffer (a plan), and not again when the buffer is
    rewritten.
    """

    def __init__(self):
        self.plans = Memory()

    def start(self, run):
        super().start(run)
        run.lens = self.plans.of(run.call.seq_lens, run.call.seq_lens.tolist)

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, run.k_cache.shape[0] - 1)


@wrong(
    decode_of,
    trigger=("a second call with the same bmm1_scale, bmm1_scale_log2 or bmm2_scale tensor after it was rewritten"),
)
class Blind5(Kernel):
    """A scale that is a tensor is read to the host once per buffer: later contents are ignored."""

    def __init__(self):
        self.read = Memory()

    def start(self, run):
        super().start(run)
        c = run.call
        if c.bmm1_scale_log2 is not None:
            run.scale1 = self.read.of(c.bmm1_scale_log2, lambda: float(c.bmm1_scale_log2) * math.log(2.0))
        elif isinstance(c.bmm1_scale, torch.Tensor):
            run.scale1 = self.read.of(c.bmm1_scale, lambda: float(c.bmm1_scale))
        if isinstance(c.bmm2_scale, torch.Tensor):
            run.scale2 = self.read.of(c.bmm2_scale, lambda: float(c.bmm2_scale))


class Blind6Model(Kernel):
    SPLIT = 512

    def __init__(self):
        self.scratch = Memory()

    def start(self, run):
        super().start(run)
        c = run.call
        run.partials = self.scratch.of(c.seq_lens, dict)

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        rows = int(position[0]) - self_first_6(run, r)
        written = run.partials.setdefault((r, rows, tuple(query.shape), values.shape[2]), [])
        for number, at in enumerate(range(0, len(keys), self.SPLIT)):
            part = slice(at, at + self.SPLIT)
            partial = self.partial(run, r, query, keys[part], values[part], seen[:, part], first_key + at)
            written[number : number + 1] = [partial]
        if not written:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        return self.finish(run, self.merge(written), sinks)


def self_first_6(run, r):
    return run.lens[r] - (run.offsets[r + 1] - run.offsets[r])


trtllm_batch_decode_with_kv_cache_6 = decode_of(Blind6Model())


@wrong(
    trigger=(
        "a later call with the same seq_lens buffer (and query shape) in which a request needs fewer splits of 512"
        " keys than in an earlier one, e.g. 1,400 keys and then 300"
    ),
)
class Blind6:
    """The merge reads as many splits (512 keys each) as any earlier call on these buffers wrote: after a request
    shrinks, stale partials stay in.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_6)


@wrong(
    decode_of,
    trigger=(
        "out_dtype or out e4m3, and outputs with elements below 1/64: many keys (from about 2,000 random ones), or"
        " a small bmm2_scale"
    ),
)
class Blind7(Kernel):
    """The cast to an e4m3 output flushes subnormals (magnitudes below 2^-6) to zero."""

    def store(self, run, r, start, stop, out, lse):
        if run.out.dtype == E4M3:
            out = torch.where(out.abs() < 2.0**-6, 0.0, out)
        super().store(run, r, start, stop, out, lse)


@wrong(
    decode_of,
    trigger=(
        "batch_size * num_kv_heads > 1,024 and a request after that with more than 256 keys (e.g. 140 requests, "
        "16/8 heads, 300 keys)"
    ),
)
class Blind8(Kernel):
    """The split reduction has 1,024 arrival counters, one per request and K/V head: for later pairs the last split
    (256 keys) is not waited for.
    """

    COUNTERS, SPLIT = 1024, 256

    def mask_scores(self, run, r, s, first_key):
        n = s.shape[3]
        if n > self.SPLIT:
            counted = max(0, self.COUNTERS - r * run.num_kv_heads)
            s[counted:, :, :, (n - 1) // self.SPLIT * self.SPLIT :] = -math.inf
        return s


@wrong(decode_of, trigger="batch over 128, num_kv_heads > 1 and a group > 1")
class Blind9(Kernel):
    """The variant for batches over 128 takes K/V head h % num_kv_heads for query head h, not h // group."""

    def start(self, run):
        super().start(run)
        if run.batch > 128 and run.group > 1 and run.num_kv_heads > 1:
            run.head_map = torch.arange(run.p.num_qo_heads) % run.num_kv_heads


@wrong(decode_of, trigger="bmm1_scale_log2 given together with a bmm1_scale that is a tensor of another value")
class Blind10(Kernel):
    """Bmm1_scale wins over bmm1_scale_log2 when both are tensors."""

    def start(self, run):
        super().start(run)
        if isinstance(run.call.bmm1_scale, torch.Tensor):
            run.scale1 = float(run.call.bmm1_scale)


@wrong(decode_of, trigger="mask, sinks and 0 <= window_left < max_seq_len in one call (any two are right)")
class Blind11(Kernel):
    """The template for mask and sinks together was instantiated without a window: with all three the window is not
    applied.
    """

    def start(self, run):
        super().start(run)
        if run.shown is not None and run.sinks is not None:
            run.window = -1


@wrong(decode_of, trigger="cum_seq_lens_q with a request whose rows * group > 64 (group at most 64)")
class Blind12(Kernel):
    """With cum_seq_lens_q, rows are packed with their group in tiles of 64; from the second tile of a request on, a
    row's position forgets the tile's first row.
    """

    def visible(self, run, r, row, position, keys):
        if run.call.cum_seq_lens_q is not None:
            per_tile = max(1, 64 // run.group)
            position = position - row // per_tile * per_tile
        return super().visible(run, r, row, position, keys)


@wrong(
    decode_of,
    trigger=("uses_shared_paged_kv_idx=False with a window that skips at least one whole page of a request"),
)
class Blind13(Kernel):
    """With separate page tables and a window, K's table is read from the window's first page on, V's from column 0."""

    def pages_of(self, run, r, columns, side):
        if side == "v" and run.window >= 0 and run.v_table is not run.k_table and len(columns):
            columns = columns - columns[0]
        return super().pages_of(run, r, columns, side)


@wrong(
    decode_of,
    trigger=("bmm2_scale a float32 tensor of 0 dimensions (or of two or more: not touched), other than 1"),
)
class Blind14(Kernel):
    """A bmm2_scale tensor is passed on by pointer only if it has one dimension: one without dimensions leaves the
    default, 1.
    """

    def start(self, run):
        super().start(run)
        if isinstance(run.call.bmm2_scale, torch.Tensor) and run.call.bmm2_scale.ndim == 0:
            run.scale2 = 1.0


@wrong(
    decode_of,
    trigger=(
        "window_left * head_dim >= 2^31 whose low 32 bits are, as a signed number, small or negative: 2^31 - 1, "
        "2^30, 10^9 with head_dim 64 or 128"
    ),
)
class Blind15(Kernel):
    """A window's start is computed as an element offset in 32 bits, window_left * head_dim: a very large window_left
    overflows.
    """

    def start(self, run):
        super().start(run)
        left, dim = run.call.window_left, run.p.head_dim
        elements = (left * dim + 2**31) % 2**32 - 2**31
        run.wrapped = None if left < 0 or elements == left * dim else elements // dim

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.wrapped is not None:
            seen = seen & (keys >= position.unsqueeze(1) - run.wrapped)
        return seen
