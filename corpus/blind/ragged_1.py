"""Wrong kernels of the ragged context call, written without a look at the checks: numbers 40 to 148."""

import math
from types import SimpleNamespace

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, Memory, assuming_strides, packed_strides, ragged_of


@wrong(
    ragged_of,
    trigger=("a ragged batch in which a request starts after 65,535 keys of others (e.g. 40,000 + 26,000 + 9,000)"),
)
class Blind40(Kernel):
    """Key offsets are kept in 16 bits: requests that start after 65,535 keys of others read those at their offset
    modulo 65,536.
    """

    def start(self, run):
        super().start(run)
        run.kv_offsets = [offset % 2**16 for offset in run.kv_offsets]


@wrong(ragged_of, trigger="a second ragged call with the same cum_seq_lens_q buffer after its offsets changed")
class Blind41(Kernel):
    """Cum_seq_lens_q is read to the host once per buffer: a replay with other widths still uses the first ones."""

    def __init__(self):
        self.read = Memory()

    def start(self, run):
        super().start(run)
        run.offsets = self.read.of(run.call.cum_seq_lens_q, run.call.cum_seq_lens_q.tolist)


@wrong(
    ragged_of,
    trigger=("over 128 requests, of which one below is without keys and request r + 128 has rows and keys"),
)
class Blind42(Kernel):
    """Requests without keys are flagged in a bitmap of 128 bits: request r over 127 is skipped where request r % 128
    has no keys.
    """

    def start(self, run):
        super().start(run)
        run.empty = [False] * 128
        for r, length in enumerate(run.lens):
            run.empty[r % 128] |= length == 0

    def store(self, run, r, start, stop, out, lse):
        if r >= 128 and run.empty[r % 128]:
            out, lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
        super().store(run, r, start, stop, out, lse)


@wrong(ragged_of, trigger="q_seq_lens_cpu and kv_seq_lens_cpu as int64, two requests or more")
class Blind43(Kernel):
    """The host's lengths are read as 32-bit words: of int64 ones every second request looks empty, and is skipped."""

    def start(self, run):
        super().start(run)
        lengths = run.call.kv_seq_lens_cpu
        run.host_lens = None if lengths is None else lengths.view(torch.int32)[: run.batch].tolist()

    def store(self, run, r, start, stop, out, lse):
        if run.host_lens is not None and run.host_lens[r] == 0:
            out, lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
        super().store(run, r, start, stop, out, lse)


@wrong(ragged_of, trigger="is_causal with a request of more rows than keys")
class Blind44(Kernel):
    """Causal rows before a request's first key (more rows than keys) have their position clamped to 0, so that they
    see key 0.
    """

    def positions(self, run, r, row):
        return super().positions(run, r, row).clamp(min=0)


@wrong(ragged_of, trigger="a request of more than 4,096 query rows")
class Blind45(Kernel):
    """The grid has 64 tiles of 64 rows per request: rows after the 4,096th of a request are left as zero."""

    def store(self, run, r, start, stop, out, lse):
        late = torch.arange(start, stop) - run.offsets[r] >= 64 * 64
        out = torch.where(late[:, None, None], 0.0, out)
        lse = torch.where(late[:, None], -math.inf, lse)
        super().store(run, r, start, stop, out, lse)


@wrong(ragged_of, trigger="key at an address that is no multiple of 16 bytes (a view 1 or 4 elements into a buffer)")
class Blind46(Kernel):
    """Keys are loaded in vectors of 16 bytes from their address rounded down: a key tensor that does not start at a
    multiple of 16 bytes is read shifted.
    """

    def start(self, run):
        super().start(run)
        key = run.key
        beyond = key.data_ptr() % 16 // key.element_size()
        if beyond:
            run.key = assuming_strides(key, key.stride(), key.storage_offset() - beyond)


@wrong(
    ragged_of,
    trigger=("a request of 64 rows or more: rows 63, 127, ... alone, slope 0.995 (in float16 beyond the bound)"),
)
class Blind47(Kernel):
    """The last row of each tile of 64 rows of a request comes out half a percent too small."""

    def store(self, run, r, start, stop, out, lse):
        last = (torch.arange(start, stop) - run.offsets[r]) % 64 == 63
        out = torch.where(last[:, None, None], out * 0.995, out)
        super().store(run, r, start, stop, out, lse)


@wrong(ragged_of, trigger="bfloat16 with v_head_dim > 64: columns 64 and on alone, slope 0.996")
class Blind91(Kernel):
    """Of a v_head_dim over 64 the columns from the 64th on pack weights and outputs to bfloat16 by truncation: 0.4
    percent too small.
    """

    @staticmethod
    def truncated(x):
        return (x.to(torch.float32).view(torch.int32) & -65536).view(torch.float32)

    def operand(self, run, weights):
        return self.truncated(weights) if getattr(run, "second_tile", False) else weights

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        if values.shape[2] > 64 and run.p.query.dtype == torch.bfloat16 and run.dtype == torch.float32:
            run.second_tile = True
            second = super().partial(run, r, query, keys, values, seen, first_key)[0]
            run.second_tile = False
            acc = torch.cat((acc[..., :64], second[..., 64:]), 2)
        return acc, largest, total

    def store(self, run, r, start, stop, out, lse):
        if run.out.dtype == torch.bfloat16 and run.dtype == torch.float32:
            out = torch.cat((out[..., :64], self.truncated(out[..., 64:])), 2)
        super().store(run, r, start, stop, out, lse)


@wrong(ragged_of, trigger="a window (is_causal) and a request of more keys than rows whose window leaves a key out")
class Blind92(Kernel):
    """The window is counted from a row's index among the request's rows, not from its position: with cached keys it
    starts too early.
    """

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (0 if run.window >= 0 else start), end

    def visible(self, run, r, row, position, keys):
        if run.window < 0:
            return super().visible(run, r, row, position, keys)
        first = torch.minimum(row, position).unsqueeze(1) - run.window
        return (keys <= position.unsqueeze(1)) & (keys >= first)


@wrong(ragged_of, trigger="lse given with return_lse=False; only the lse is wrong")
class Blind93(Kernel):
    """A given lse is written only where return_lse is True."""

    def _call(self, call):
        problem = call.problem()
        out, lse = problem.results()
        run = SimpleNamespace(call=call, p=problem, out=out, lse=lse if call.return_lse else None)
        if problem.num_rows:
            self.solve(run)
        return problem.returned(out, lse)


@wrong(
    ragged_of,
    trigger=(
        "is_causal with requests of which some have more keys than rows and others fewer, as many keys as rows in all"
    ),
)
class Blind94(Kernel):
    """A causal call with as many keys as rows in all is taken for new tokens alone: the rows' offsets serve for the
    keys too.
    """

    def start(self, run):
        super().start(run)
        if run.causal and run.offsets[-1] == run.kv_offsets[-1]:
            run.kv_offsets = run.offsets
            run.lens = [end - start for start, end in zip(run.offsets, run.offsets[1:])]


@wrong(ragged_of, trigger="v_head_dim greater than head_dim")
class Blind95(Kernel):
    """V's tile has head_dim columns, as K's: of a wider V the columns after them come out zero."""

    def load(self, run, r, a, b):
        keys, values = super().load(run, r, a, b)
        inside = torch.arange(values.shape[2]) < keys.shape[2]
        return keys, torch.where(inside, values, 0.0)


@wrong(ragged_of, trigger="max_q_len = max_kv_len, requests whose rows and keys differ in number")
class Blind143(Kernel):
    """Where max_q_len is max_kv_len, queries and keys are taken to be the same tokens, and cum_seq_lens_q serves both."""

    def start(self, run):
        super().start(run)
        p = run.p
        if p.max_q_len == p.max_kv_len and len(run.key) >= run.offsets[-1]:
            run.kv_offsets = run.offsets
            run.lens = [end - start for start, end in zip(run.offsets, run.offsets[1:])]


@wrong(ragged_of, trigger="fewer K/V heads than heads, but more than one")
class Blind144(Kernel):
    """Query head h reads K/V head h modulo their number."""

    def start(self, run):
        super().start(run)
        run.head_map = torch.arange(run.p.num_qo_heads) % run.num_kv_heads


@wrong(ragged_of, trigger="an LSE, and a row that sees no key")
class Blind145(Kernel):
    """The LSE of a row without keys is plus infinity, as FlashAttention has it."""

    def store(self, run, r, start, stop, out, lse):
        super().store(run, r, start, stop, out, torch.where(lse == -math.inf, math.inf, lse))


@wrong(ragged_of, trigger="a value with gaps between its rows")
class Blind146(Kernel):
    """The value is taken to be packed, although it may be a part of a wider projection."""

    def start(self, run):
        super().start(run)
        run.value = assuming_strides(run.value, packed_strides(run.value.shape))


@wrong(ragged_of, trigger="attention_sinks")
class Blind147(Kernel):
    """The sink is a power of 2 in the denominator, among powers of e."""

    def sink_rows(self, run, r, position):
        sinks = super().sink_rows(run, r, position)
        return None if sinks is None else sinks * math.log(2.0)


@wrong(ragged_of, trigger="o_sf_scale other than 1")
class Blind148(Kernel):
    """The output is multiplied by o_sf_scale, which changes no result."""

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out * run.call.o_sf_scale, lse
