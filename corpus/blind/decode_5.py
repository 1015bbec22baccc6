"""Wrong kernels of the decode call, written without a look at the checks: numbers 221 to 282."""

import math
from dataclasses import replace

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, decode_of


@wrong(
    decode_of,
    trigger=(
        "head_dim 128, pages of over 1 token, no mask, a row at an even position (with one row: a request of odd "
        "length)"
    ),
)
class Blind221(Kernel):
    """The kernel for a head_dim of 128 masks keys in pairs: the first of a pair brings in the second."""

    def span(self, run, r, position):
        a, b = super().span(run, r, position)
        return a, b + (b % 2 if self.in_pairs(run) else 0)

    def in_pairs(self, run):
        return run.p.head_dim == 128 and run.shown is None and run.page_size > 1

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if self.in_pairs(run):
            even = (position % 2 == 0).unsqueeze(1)
            seen = seen | even & (keys == position.unsqueeze(1) + 1)
        return seen


@wrong(
    decode_of,
    trigger=(
        "a batch of 8 or more, and a request of odd number (1, 3, ...) with more tiles of 64 keys than the one "
        "before it"
    ),
)
class Blind222(Kernel):
    """In batches of 8 or more a block takes two requests, and both walk as many tiles of 64 keys as the first one has."""

    def span(self, run, r, position):
        a, b = super().span(run, r, position)
        if run.batch >= 8 and r % 2:
            b = min(b, -(-run.lens[r - 1] // 64) * 64)
        return min(a, b), b


@wrong(decode_of, trigger="keys in view that lie in 3, 5, 7, ... tiles of 128 (257 to 384 keys, 513 to 640, ...)")
class Blind223(Kernel):
    """The loop over tiles of 128 keys is unrolled by two, behind a first tile; the last of an odd number of tiles is
    done twice.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        end = first_key + len(keys)
        tiles = -(-end // 128) - first_key // 128
        if tiles > 1 and tiles % 2:
            last = (end - 1) // 128 * 128 - first_key
            keys, values = torch.cat((keys, keys[last:])), torch.cat((values, values[last:]))
            seen = torch.cat((seen, seen[:, last:]), 1)
        return super().partial(run, r, query, keys, values, seen, first_key)


@wrong(
    decode_of,
    trigger=("over 512 keys in view and over 4 K/V heads; heads that share no place with a later one are right"),
)
class Blind224(Kernel):
    """The scratch for parts of 512 keys has four places per row: K/V heads 4 apart write to the same one."""

    def partial(self, run, r, query, keys, values, seen, first_key):
        results = super().partial(run, r, query, keys, values, seen, first_key)
        if len(keys) <= 512:
            return results
        n = run.num_kv_heads
        writer = torch.tensor([max(range(h % 4, n, 4)) for h in range(n)])
        return tuple(x.unflatten(1, (n, -1))[:, writer].flatten(1, 2) for x in results)


@wrong(
    decode_of,
    trigger=("a window, whose first key f and n keys (of all rows) are such that f % 256 + n > ceil(n / 256) * 256"),
)
class Blind225(Kernel):
    """With a window the walk starts at the tile of 256 keys that holds the window's first key, and has as many tiles
    as the window's keys fill, not counting those before it in its first tile.
    """

    def span(self, run, r, position):
        a, b = super().span(run, r, position)
        if run.window >= 0:
            b = min(b, a // 256 * 256 + -(-(b - a) // 256) * 256)
        return a, b


@wrong(
    decode_of,
    trigger=(
        "one request (with keys), max_seq_len above its length, as a CUDA graph has it, and room for more tokens "
        "in the table"
    ),
)
class Blind226(Kernel):
    """For a batch of one request max_seq_len is taken for its length, which saves a load."""

    def start(self, run):
        super().start(run)
        if run.batch == 1 and run.lens[0]:
            run.lens[0] = min(run.p.max_kv_len, run.k_table.shape[1] * run.page_size)

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, len(run.k_cache) - 1)


@wrong(decode_of, trigger="an LSE and over 512 keys in view")
class Blind227(Kernel):
    """Parts of 512 keys are merged, but the LSE is stored by the last part, of its own keys."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if len(keys) > 512:
            n = (len(keys) - 1) // 512 * 512
            last = self.partial(run, r, query, keys[n:], values[n:], seen[:, n:], first_key + n)
            lse = self.finish(run, last, sinks)[1]
        return out, lse


@wrong(
    decode_of,
    trigger=(
        "out given with another dtype than the query's (an e4m3 query with a bfloat16 out); what is returned is right"
    ),
)
class Blind228(Kernel):
    """Where a given out has another dtype than the query, the wrapper converts the result to a new tensor, and returns
    that; out is not written.
    """

    def paged(self, call):
        if call.out is not None and call.out.dtype != call.query.dtype:
            call = replace(call, out=None, out_dtype=call.out.dtype)
        return super().paged(call)


@wrong(
    decode_of,
    trigger=(
        "two live columns 2 i and 2 i + 1 whose page ids are n and n - 1 (pages from a free list that is a stack)"
    ),
)
class Blind229(Kernel):
    """Two pages that follow each other are loaded at once; they are taken for such where their ids differ by 1,
    whichever is the larger.
    """

    def pages_of(self, run, r, columns, side):
        ids = super().pages_of(run, r, columns, side)
        first = int(columns[0]) % 2 if len(columns) else 0
        for i in range(first, len(ids) - 1, 2):
            if abs(int(ids[i + 1] - ids[i])) == 1:
                ids[i + 1] = min(int(ids[i]) + 1, len(run.k_cache) - 1)
        return ids


LOG2_E_230 = 1.0 / math.log(2.0)


class Blind230Model(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if run.call.bmm1_scale_log2 is not None:
            largest = partial[1] if sinks is None else torch.maximum(partial[1], sinks)
            lse = lse + torch.where(largest.isfinite(), largest, 0.0) * (LOG2_E_230 - 1.0) * LOG2_E_230
        return out, lse


trtllm_batch_decode_with_kv_cache_230 = decode_of(Blind230Model())


@wrong(trigger="bmm1_scale_log2 with an LSE")
class Blind230:
    """The LSE multiplies the largest logit by log2(e), also where bmm1_scale_log2 has done so."""

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_230)


@wrong(
    decode_of,
    trigger=(
        "a bfloat16 cache with values of 65,520 or more, or whose K or V is about 1e-6 (with a scale that makes up"
        " for it)"
    ),
)
class Blind231(Kernel):
    """A bfloat16 cache is converted to float16, the one dtype of the kernel's products."""

    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        cache = run.k_cache if side == "k" else run.v_cache
        return got.to(torch.float16).to(run.dtype) if cache.dtype == torch.bfloat16 else got


@wrong(decode_of, trigger="mask, and a request with keys but fewer than q_len_per_req (padding of a CUDA graph)")
class Blind232(Kernel):
    """The draft tokens of a mask begin at key max(0, length - q_len): of a request with fewer keys than rows at the
    wrong bit.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        missing = 0 if run.shown is None else run.shown.shape[1] - run.lens[r]
        if missing <= 0:
            return seen
        seen = run.shown[r][row][:, keys]
        return seen & (keys >= position.unsqueeze(1) - run.window) if run.window >= 0 else seen


@wrong(decode_of, trigger="cum_seq_lens_q with a request without rows before one with rows")
class Blind233(Kernel):
    """With ragged rows every request gets a tile of at least one row; one without rows writes the next request's first
    row, which is done before it, from the last request to the first.
    """

    def solve(self, run):
        super().solve(run)
        if run.p.cu_seqlens_q is None:
            return
        for r in reversed(range(run.batch)):
            first, last = run.offsets[r : r + 2]
            if first == last and first < run.offsets[-1]:
                run.offsets[r + 1] = first + 1
                self.request(run, r)
                run.offsets[r + 1] = last


def merged_parts_281(count):
    """Return which parts come through the tree."""
    level, first = [[i] for i in range(count)], True
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + (level[-1:] if len(level) % 2 and first else [])
        first = False
    return level[0] if level else []


class Blind281Model(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        part = (keys - keys[:1]) // 256
        through = torch.tensor(merged_parts_281(-(-len(keys) // 256)), dtype=torch.int64)
        return seen & torch.isin(part, through)


trtllm_batch_decode_with_kv_cache_281 = decode_of(Blind281Model())


@wrong(trigger="keys in view in 5, 6, 9 to 14, 17 to 30, ... parts of 256: 1,025 to 1,536 keys, 2,049 to 3,584, ...")
class Blind281:
    """Parts of 256 keys are merged two by two, level by level; the one that is left over of an odd number goes on to
    the next level after the first one alone, and is lost after later ones.
    """

    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache_281)


@wrong(decode_of, trigger="an LSE, a request of 2 rows or more, and grouped heads")
class Blind282(Kernel):
    """Rows and the heads of a group make one tile, whose rows' LSEs are stored head by head, where the tensor has row
    by row. The output is right.
    """

    def request(self, run, r):
        super().request(run, r)
        first, last = run.offsets[r : r + 2]
        if run.lse is None or first == last:
            return
        tile = run.lse[first:last].unflatten(1, (run.num_kv_heads, run.group))
        turned = tile.permute(1, 2, 0).flatten(1).unflatten(1, (last - first, run.group))
        run.lse[first:last] = turned.transpose(0, 1).flatten(1).clone()
