"""Wrong kernels of the ragged context call, written without a look at the checks: numbers 434 to 554."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, assuming_strides, ragged_of


@wrong(
    ragged_of,
    trigger=("`attention_sinks` with -inf in a head, and a row that sees no key: NaN in its output and LSE"),
)
class Blind434(Kernel):
    """A row without keys in a head whose sink is -inf: the largest logit is -inf, and exp(-inf - -inf) makes output
    and LSE NaN.
    """

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None:
            empty = (sinks == -math.inf) & (partial[1] == -math.inf)
            out, lse = out.masked_fill(empty.unsqueeze(2), math.nan), lse.masked_fill(empty, math.nan)
        return out, lse


@wrong(ragged_of, trigger="o_sf_scale other than 1 (SGLang passes -1 for chunks)")
class Blind461(Kernel):
    """O_sf_scale is folded into the factor of the output, though outputs of 16 bits have none: the chunks of a prefix,
    with -1, come out negated.
    """

    def start(self, run):
        super().start(run)
        run.scale2 *= float(run.call.o_sf_scale)


TILE_462 = 128


class Blind462Model(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        if not run.causal and run.p.max_kv_len % TILE_462 == 0:
            end = -(-end // TILE_462) * TILE_462
        return start, end

    def load(self, run, r, a, b):
        sides = super().load(run, r, a, b)
        missing = b - a - len(sides[0])
        return (
            tuple(torch.cat((side, side.new_zeros(missing, *side.shape[1:]))) for side in sides) if missing else sides
        )


trtllm_ragged_attention_deepseek_462 = ragged_of(Blind462Model())


@wrong(trigger="is_causal=False, max_kv_len a multiple of 128, a request whose keys are none")
class Blind462:
    """Not causal: the host decides by max_kv_len % 128 whether last tiles need a mask; where they seem whole, shorter
    requests read what follows their keys.
    """

    trtllm_ragged_attention_deepseek = staticmethod(trtllm_ragged_attention_deepseek_462)


@wrong(ragged_of, trigger="is_causal=True, max_q_len = max_kv_len, a request with other numbers of rows and keys")
class Blind463(Kernel):
    """Causal: where max_q_len equals max_kv_len all requests are taken to be square, and row i to be at position i."""

    def positions(self, run, r, row):
        return row if run.causal and run.p.max_q_len == run.p.max_kv_len else super().positions(run, r, row)


@wrong(ragged_of, trigger="head_dim 256 and v_head_dim 256; a bias of -0.3 to -0.8 percent")
class Blind464(Kernel):
    """Head_dims (256, 256): P is made with a polynomial of degree 2 for 2^x, the denominator with the exact one: the
    output is 0.8 percent too small.
    """

    def operand(self, run, weights):
        if run.query.shape[2] != 256 or run.value.shape[2] != 256:
            return weights
        x = torch.log2(weights)
        whole = torch.floor(torch.where(x.isfinite(), x, 0.0))
        f = torch.where(x.isfinite(), x - whole, 0.0)
        made = (1.0 + 0.693147 * f + 0.240227 * f * f) * torch.exp2(whole)
        return torch.where(weights > 0, made, weights)


@wrong(ragged_of, trigger="q_seq_lens_cpu / kv_seq_lens_cpu given as int64, two requests or more")
class Blind492(Kernel):
    """The lengths on the host are read as int32 whatever their dtype, to leave out empty requests: of int64 ones every
    second looks empty.
    """

    def request(self, run, r):
        for mirror in (run.call.q_seq_lens_cpu, run.call.kv_seq_lens_cpu):
            if mirror is not None and int(mirror.view(torch.int32)[r]) == 0:
                first, last = run.offsets[r : r + 2]
                run.out[first:last] = 0
                if run.lse is not None:
                    run.lse[first:last] = -math.inf
                return
        super().request(run, r)


@wrong(
    ragged_of,
    trigger=("a given lse whose heads are not side by side (lse.stride(1) != 1), e.g. the transpose of [heads, rows]"),
)
class Blind493(Kernel):
    """The LSE's rows are written by their stride, and its heads side by side: one that is the transpose of [heads,
    rows] is scrambled.
    """

    def start(self, run):
        super().start(run)
        if run.lse is not None and run.lse.stride(1) != 1:
            run.lse = assuming_strides(run.lse, (run.lse.stride(0), 1))


@wrong(ragged_of, trigger="o_sf_scale positive and other than 1")
class Blind494(Kernel):
    """A positive o_sf_scale is folded into the output's scale, whatever the output's dtype (-1 stands for none)."""

    def start(self, run):
        super().start(run)
        if run.call.o_sf_scale > 0:
            run.scale2 *= run.call.o_sf_scale


@wrong(ragged_of, trigger="is_causal with a request of over 32,768 keys")
class Blind495(Kernel):
    """The rows' positions of the causal mask are kept in 16 bits: from 32,768 on they are negative."""

    def visible(self, run, r, row, position, keys):
        if run.causal:
            position = position.to(torch.int16).long()
        return super().visible(run, r, row, position, keys)


@wrong(
    ragged_of,
    trigger=("NaN or infinity in V within the tile after the end of a request (tokens after the last offset)"),
)
class Blind522(Kernel):
    """V is loaded in tiles of 64 tokens that run past a request's end with weights of zero: NaN or infinity after it
    makes the result NaN.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        end = first_key + len(keys)
        first = run.kv_offsets[r]
        tail = run.value[first + end : first + -(-end // 64) * 64].to(run.dtype)
        return acc + (tail * 0).sum(0).repeat_interleave(run.group, 0), largest, total


@wrong(ragged_of, trigger="causal window_left with more keys than rows in a request")
class Blind523(Kernel):
    """The window is measured from the row's number among the new tokens, not from its position after the cached ones."""

    def span(self, run, r, position):
        return 0, super().span(run, r, position)[1]

    def visible(self, run, r, row, position, keys):
        if not run.causal or run.window < 0:
            return super().visible(run, r, row, position, keys)
        return (keys <= position[:, None]) & (keys >= row[:, None] - run.window)


@wrong(ragged_of, trigger="value that is a slice of a tensor with more heads")
class Blind524(Kernel):
    """V's token stride is taken as its head stride times its heads: a slice of the heads of a wider tensor is read
    wrongly.
    """

    def start(self, run):
        super().start(run)
        value = run.value
        run.value = assuming_strides(value, (value.shape[1] * value.stride(1), *value.stride()[1:]))


@wrong(ragged_of, trigger="kv_seq_lens_cpu (and q_seq_lens_cpu) int64, 2 or more requests")
class Blind525(Kernel):
    """The lengths on the host are read as int32 whatever their dtype: of int64 ones every other is the upper half, 0."""

    def start(self, run):
        super().start(run)
        mirror = run.call.kv_seq_lens_cpu
        if mirror is not None:
            lens = mirror.view(torch.int32)[: run.batch].tolist()
            run.lens = [min(n, len(run.key) - at) for n, at in zip(lens, run.kv_offsets)]


@wrong(ragged_of, trigger="q_seq_lens_cpu of int64, two requests or more")
class Blind552(Kernel):
    """The host's row counts are read as int32 whatever their dtype: of int64 ones every second number is 0, and such a
    request is skipped as empty.
    """

    def request(self, run, r):
        mirror = run.call.q_seq_lens_cpu
        if mirror is not None and int(mirror.view(torch.int32)[r]) == 0:
            first, last = run.offsets[r : r + 2]
            run.out[first:last] = 0
            if run.lse is not None:
                run.lse[first:last] = -math.inf
            return
        super().request(run, r)


TILE_553 = 64


class Blind553Model(Kernel):
    def store(self, run, r, start, stop, out, lse):
        if run.causal and run.lens[r] > 0:
            row = torch.arange(start, stop) - run.offsets[r]
            q_len = run.offsets[r + 1] - run.offsets[r]
            last = ((row // TILE_553 + 1) * TILE_553).clamp(max=q_len) - 1
            early = run.lens[r] - q_len + last < 0
            lse = torch.where(early.unsqueeze(1), 0.0, lse)
        super().store(run, r, start, stop, out, lse)


trtllm_ragged_attention_deepseek_553 = ragged_of(Blind553Model())


@wrong(
    trigger=(
        "is_causal, a request with keys and a whole tile of 64 rows (or its last part) before the first key, LSE "
        "returned"
    ),
)
class Blind553:
    """A tile of 64 rows wholly before a request's first key leaves early with zeros, and with an LSE of 0."""

    trtllm_ragged_attention_deepseek = staticmethod(trtllm_ragged_attention_deepseek_553)


LONG_554 = 1024


class Blind554Model(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = len(keys)
        if run.causal or n <= LONG_554:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        middle = -(-n // 128) // 2 * 128
        cuts = slice(0, middle), slice(middle, n)
        partials = [self.partial(run, r, query, keys[c], values[c], seen[:, c], first_key + c.start) for c in cuts]
        out, _ = self.finish(run, self.merge(partials), sinks)
        lse = [self.finish(run, partial, s)[1] for partial, s in zip(partials, (sinks, None))]
        return out, torch.maximum(*lse)


trtllm_ragged_attention_deepseek_554 = ragged_of(Blind554Model())


@wrong(trigger="is_causal=False, a request of more than 1,024 keys, LSE returned")
class Blind554:
    """A chunk of a prefix of more than 1024 keys is split between two CTAs; the LSE of the two is the larger one, not
    that of their sum.
    """

    trtllm_ragged_attention_deepseek = staticmethod(trtllm_ragged_attention_deepseek_554)
