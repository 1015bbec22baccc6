"""Blind kernels: several stages of a ragged call."""

import math

import torch

from corpus.models.attention import Attention, truncated
from corpus.wrong import RAGGED, wrong


@wrong(RAGGED, trigger="over 128 requests: one below without keys, and request r + 128 with rows and keys")
class Blind42(Attention):
    """Requests without keys are flagged in 128 bits: request r over 127 is skipped where request r % 128 has no keys."""

    def host(self, run):
        run.empty = [False] * 128
        for r, length in enumerate(run.lens):
            run.empty[r % 128] |= length == 0

    def store(self, run, r, start, stop, out, lse):
        if r >= 128 and run.empty[r % 128]:
            out, lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
        super().store(run, r, start, stop, out, lse)


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

    def store(self, run, r, start, stop, out, lse):
        if run.out.dtype == torch.bfloat16 and run.dtype == torch.float32:
            out = torch.cat((out[..., :64], truncated(out[..., 64:])), 2)
        super().store(run, r, start, stop, out, lse)


@wrong(
    RAGGED,
    trigger="a window (is_causal) and a request of more keys than rows whose window leaves a key out",
    also=("blind523",),
)
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


@wrong(RAGGED, trigger="lse given with return_lse=False")
class Blind585(Attention):
    """A given lse is written only with return_lse."""

    def host(self, run):
        if not run.call.return_lse:
            run.lse = None

    def solve(self, run):
        given = run.lse
        if not run.call.return_lse:
            run.lse = None
        super().solve(run)
        run.lse = given
