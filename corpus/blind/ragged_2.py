"""Wrong kernels of the ragged context call, written without a look at the checks: numbers 194 to 308."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, ragged_of


@wrong(
    ragged_of,
    trigger=("over 1,056 tiles: sum of ceil(rows / 64) times heads (128 heads and 9 requests, or one of 513 rows)"),
)
class Blind194(Kernel):
    """132 persistent blocks take at most 8 tiles each, of 64 rows of a request and one head: tiles after the 1,056th
    are left as zero.
    """

    def start(self, run):
        super().start(run)
        run.tiles = [0]
        for first, last in zip(run.offsets, run.offsets[1:]):
            run.tiles.append(run.tiles[-1] - (first - last) // 64)

    def store(self, run, r, start, stop, out, lse):
        heads = out.shape[1]
        row_tile = run.tiles[r] + (torch.arange(start, stop) - run.offsets[r]) // 64
        late = row_tile.unsqueeze(1) * heads + torch.arange(heads) >= 132 * 8
        super().store(run, r, start, stop, out.masked_fill(late.unsqueeze(2), 0), lse.masked_fill(late, 0))


@wrong(
    ragged_of,
    trigger=(
        "a row that sees over 131 keys; of random ones beyond the bound from some 160 on for some vectors (error "
        "0.03), at 2,000 for all; the LSE is too large too"
    ),
)
class Blind195(Kernel):
    """After the first 128 keys the power of 2 of every fourth key is taken by a line, 1 + the fraction, up to 6
    percent too large.
    """

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


@wrong(ragged_of, trigger="attention_sinks with is_causal=False")
class Blind196(Kernel):
    """The kernel for is_causal=False, made for chunks of a prefix, has no sinks."""

    def sink_rows(self, run, r, position):
        return super().sink_rows(run, r, position) if run.causal else None


@wrong(ragged_of, trigger="bmm1_scale as a tensor: it has changed after the call")
class Blind197(Kernel):
    """A bmm1_scale that is a tensor is turned to base 2 in the caller's memory."""

    def paged(self, call):
        result = super().paged(call)
        if isinstance(call.bmm1_scale, torch.Tensor):
            call.bmm1_scale.mul_(1 / math.log(2.0))
        return result


@wrong(
    ragged_of,
    trigger=(
        "q_seq_lens_cpu and kv_seq_lens_cpu given, and a request with more rows than max(kv_seq_lens_cpu) rounded "
        "up to 64 (a short chunk of a prefix)"
    ),
)
class Blind198(Kernel):
    """With lengths on the host the grid has as many tiles of 64 rows as the longest request's keys need; rows after
    them are left as zero.
    """

    def store(self, run, r, start, stop, out, lse):
        host = run.call.host_lengths()
        if host is not None and max(host[1], default=0):
            late = torch.arange(start, stop) - run.offsets[r] >= 64 * -(-max(host[1]) // 64)
            out, lse = out.masked_fill(late[:, None, None], 0), lse.masked_fill(late.unsqueeze(1), 0)
        super().store(run, r, start, stop, out, lse)


@wrong(
    ragged_of,
    trigger=(
        "logits of a row around 32 or more with a bfloat16 query (its LSE from about 8), around 4 or more with a "
        "float16 one"
    ),
)
class Blind199(Kernel):
    """Logits are kept in float16 until the largest is subtracted: large ones lose the bits that tell them apart."""

    def mask_scores(self, run, r, s, first_key):
        rounded = s.clamp(-65504.0, 65504.0).to(torch.float16).to(s.dtype)
        return torch.where(s.isfinite(), rounded, s)


@wrong(
    ragged_of,
    trigger=("a window, and a first row of a tile of 64 rows whose window starts after key 0 and at no multiple of 64"),
)
class Blind200(Kernel):
    """With a window, a tile of 64 rows begins at the first tile of 64 keys that lies in its first row's window whole."""

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.window < 0:
            return seen
        first_row = position - row % 64
        first = -(-(first_row - run.window).clamp(min=0) // 64) * 64
        return seen & (keys >= first.unsqueeze(1))


@wrong(
    ragged_of,
    trigger=(
        "head_dim 192, several K/V heads, and a key whose heads differ from column 128 on (as of models other than"
        " DeepSeek's)"
    ),
)
class Blind254(Kernel):
    """For a head_dim of 192 the key's columns from 128 on, which are DeepSeek's rotary part and the same for all
    heads, are read of head 0 alone.
    """

    def load(self, run, r, a, b):
        keys, values = super().load(run, r, a, b)
        if keys.shape[2] == 192:
            keys = torch.cat((keys[..., :128], keys[:, :1, 128:].expand(-1, keys.shape[1], -1)), 2)
        return keys, values


@wrong(ragged_of, trigger="attention_sinks, return_lse=False and no lse")
class Blind255(Kernel):
    """Sinks are added to the denominator by the code that makes the LSE, which is left out where no LSE is asked for."""

    def sink_rows(self, run, r, position):
        return None if run.lse is None else super().sink_rows(run, r, position)


@wrong(
    ragged_of,
    trigger=(
        "skip_all_rows_active_check=True, which is the default, no sinks, and a row that sees no key: they are NaN"
    ),
)
class Blind256(Kernel):
    """Skip_all_rows_active_check=True is taken at its word, that every row sees a key: rows that see none are divided
    by zero.
    """

    def store(self, run, r, start, stop, out, lse):
        if run.call.skip_all_rows_active_check:
            out = out.masked_fill((lse == -torch.inf).unsqueeze(2), torch.nan)
        super().store(run, r, start, stop, out, lse)


@wrong(ragged_of, trigger="q_seq_lens_cpu and kv_seq_lens_cpu given, and a request without keys before one with keys")
class Blind257(Kernel):
    """With lengths on the host, requests without keys are taken out of the batch, their keys' offsets and lengths, but
    not their rows' offsets: later requests get the rows of those before them.
    """

    def start(self, run):
        super().start(run)
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


@wrong(
    ragged_of,
    trigger=(
        "an LSE, and a request of 65 rows or more whose rows 64 to 127 (of each 128) see a key of their last tile of 64"
    ),
)
class Blind258(Kernel):
    """Of a tile of 128 rows the second warp group, rows 64 and on, takes the LSE of its sums before the last tile of
    64 keys is in them.
    """

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        q_len = run.offsets[r + 1] - run.offsets[r]
        prefix = run.lens[r] - q_len
        row = position - prefix
        last_row = (row // 128 * 128 + 127).clamp(max=q_len - 1)
        end = (prefix + last_row + 1).clamp(min=0) if run.causal else torch.full_like(row, run.lens[r])
        before = (first_key + torch.arange(len(keys))) < ((end - 1) // 64 * 64).unsqueeze(1)
        part = self.partial(run, r, query, keys, values, seen & before, first_key)
        _, early = self.finish(run, part, sinks)
        return out, torch.where((row % 128 >= 64).unsqueeze(1), early, lse)


@wrong(
    ragged_of,
    trigger=(
        "is_causal, and a row at position 2,048 or later that is not its request's last, such as 2,048, 2,051 or 2,052"
    ),
)
class Blind259(Kernel):
    """The causal mask compares the numbers of keys and rows two at a time, as float16, which has not every integer
    over 2,048.
    """

    def span(self, run, r, position):
        return super().span(run, r, position)[0], run.lens[r]

    def visible(self, run, r, row, position, keys):
        rows = position.unsqueeze(1)
        if not run.causal:
            return super().visible(run, r, row, position, keys)
        seen = keys.half() <= rows.half()
        return seen & (keys >= rows - run.window) if run.window >= 0 else seen


@wrong(ragged_of, trigger="a row that sees keys on both sides of a multiple of 128")
class Blind260(Kernel):
    """Tiles of 128 keys are summed by turns in two sets of registers, which are merged in the end, each with the
    factor of the other one's largest logit.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        if first_key + len(keys) <= 128:
            return super().partial(run, r, query, keys, values, seen, first_key)
        odd = (first_key + torch.arange(len(keys))) // 128 % 2 == 1
        a, m, l = super().partial(run, r, query, keys, values, seen & ~odd, first_key)
        b, n, k = super().partial(run, r, query, keys, values, seen & odd, first_key)
        largest = torch.maximum(m, n)
        both = m.isfinite() & n.isfinite()
        of_a = torch.where(both, torch.exp(n - largest), m.isfinite().to(m.dtype))
        of_b = torch.where(both, torch.exp(m - largest), n.isfinite().to(m.dtype))
        return a * of_a.unsqueeze(2) + b * of_b.unsqueeze(2), largest, l * of_a + k * of_b


@wrong(ragged_of, trigger="an odd number of query heads")
class Blind307(Kernel):
    """A block takes two heads, and there are num_qo_heads // 2 of them: the last one of an odd number is left as zero."""

    def store(self, run, r, start, stop, out, lse):
        if run.p.num_qo_heads % 2:
            out[:, -1], lse[:, -1] = 0.0, -math.inf
        super().store(run, r, start, stop, out, lse)


@wrong(ragged_of, trigger="is_causal, and a request whose keys before its first row are a multiple of 128 (not 0)")
class Blind308(Kernel):
    """Where a request's cached keys are a multiple of 128, a tile of 128 rows ends before the tile of keys on the
    diagonal.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        cached = run.lens[r] - (run.offsets[r + 1] - run.offsets[r])
        if not run.causal or cached <= 0 or cached % 128:
            return seen
        return seen & (keys < (cached + row // 128 * 128).unsqueeze(1))
