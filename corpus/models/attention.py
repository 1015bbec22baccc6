"""A right model of the four attention calls. A wrong kernel replaces one stage.

The stages of a call, in order: `start` reads host facts and calls `host`; `load` reads K and V of some keys, from the pages of
`pages_of`; `visible`; `sink_rows`; `attend`, which consists of `partial` and `finish`; and `store`, which calls `lost`,
`stored_out` and `stored_lse`.
"""

import math
from types import SimpleNamespace

import torch

from corpus.wrong import Model
from lab.calls import ContextCall, DecodeCall, MLADecodeCall, RaggedContextCall, takes
from lab.references.quantization import deinterleave_v_scale_factors, dequantize_nvfp4

E4M3 = torch.float8_e4m3fn
SCORES_AT_ONCE = 2**24


def index(tensor, i):
    """Index a tensor of any dtype, also e4m3, along its first dimension."""
    if tensor.dtype == E4M3:
        return tensor.view(torch.uint8)[i].view(E4M3)
    return tensor[i]


def saturated(values, dtype):
    if dtype == E4M3:
        values = values.clamp(-448.0, 448.0)
    return values.to(dtype)


def truncated(values, dtype=torch.bfloat16):
    """Cut the bits of values that a half dtype does not have, and return float32."""
    dropped = 16 if dtype == torch.bfloat16 else 13
    return (values.to(torch.float32).contiguous().view(torch.int32) >> dropped << dropped).view(torch.float32)


class Memory:
    """What a kernel remembers about buffers, by address and shape. It holds the buffers, so that their addresses are not used
    again.
    """

    def __init__(self, most=64):
        self.most = most
        self.held = {}

    def of(self, tensor, make):
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key not in self.held:
            while len(self.held) >= self.most:
                del self.held[next(iter(self.held))]
            self.held[key] = (tensor, make())
        return self.held[key][1]


def assuming_strides(tensor, strides, offset=None):
    """Return a tensor as a kernel reads it that assumes other strides. If these would leave the storage, return the tensor."""
    offset = tensor.storage_offset() if offset is None else offset
    last = offset + sum((n - 1) * s for n, s in zip(tensor.shape, strides))
    if tensor.numel() == 0 or offset < 0 or last >= tensor.untyped_storage().nbytes() // tensor.element_size():
        return tensor
    return torch.as_strided(tensor, tensor.shape, strides, offset)


def packed_strides(shape):
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return strides


class Run(SimpleNamespace):
    """A call, its problem `p`, its results `out` and `lse`, and the host facts that `start` reads."""

    def cache(self, side):
        return self.k_cache if side == "k" else self.v_cache

    def table(self, side):
        return self.k_table if side == "k" else self.v_table

    def num_rows(self, r):
        return self.offsets[r + 1] - self.offsets[r]


def by_row(*sides):
    """Turn [kv_heads, rows, group, ...] into [rows, heads, ...]."""
    return tuple(side.transpose(0, 1).flatten(1, 2) for side in sides)


class Attention(Model):
    forgiving = False  # a page id outside the pool is read as the nearest one
    split = 0  # keys of a part, whose partial results are merged; 0: all keys are one part

    def __init__(self):
        self.memory = Memory()
        self.kept = {}

    # ---- the four calls
    trtllm_batch_decode_with_kv_cache = property(lambda self: takes(DecodeCall)(self.paged))
    trtllm_batch_context_with_kv_cache = property(lambda self: takes(ContextCall)(self.paged))
    trtllm_batch_decode_with_kv_cache_mla = property(lambda self: takes(MLADecodeCall)(self.mla))
    trtllm_ragged_attention_deepseek = property(lambda self: takes(RaggedContextCall)(self.paged))

    def paged(self, call):
        problem = call.problem()
        if getattr(problem, "is_block_sparse", False):
            raise NotImplementedError("this model has one page table for all K/V heads")
        if getattr(problem, "block_scales", None) is not None:
            problem = problem.dequantized()
        return problem.returned(*self.solved(call, problem))

    def solved(self, call, problem):
        if getattr(problem, "selected", None) is not None:
            raise NotImplementedError("this model has no rows that select entries")
        out, lse = problem.results()
        if problem.num_rows:
            self.solve(Run(call=call, p=problem, out=out, lse=lse))
        return out, lse

    def mla(self, call):
        out, lse = self.solved(call, call.problem())
        if lse is not None and call.lse_is_base_e:
            lse *= math.log(2.0)
        return call.returned(out, lse)

    # ---- host facts
    def start(self, run):
        p = run.p
        run.is_ragged = hasattr(p, "key")
        wide = torch.float32, torch.float64
        run.dtype = torch.float64 if p.query.dtype in wide or p.out_dtype in wide else torch.float32
        run.query = p.query
        run.lens = p.seq_lens.tolist()
        run.offsets = p.row_offsets()
        run.scale1, run.scale2 = float(p.bmm1_scale), float(p.bmm2_scale)
        run.sinks = None if p.sinks is None else p.sinks.to(run.dtype)
        run.window, run.causal = p.window_left, p.causal
        run.batch = p.batch_size
        run.num_kv_heads = p.num_kv_heads
        run.group = p.group
        run.head_map = None  # K/V head of each query head, where it is not h // group
        if run.is_ragged:
            run.kv_offsets = p.cu_seqlens_kv.tolist()
            run.key, run.value = p.key, p.value
        else:
            run.k_cache, run.v_cache = p.k_cache, p.v_cache
            run.v_factors = p.v_scale_factors
            if p.v_scale_factors is not None and p.v_scale_factors_interleaved:
                run.v_factors = deinterleave_v_scale_factors(p.v_scale_factors.view(torch.uint8)).view(E4M3)
            run.k_table, run.v_table = p.k_block_tables, p.v_block_tables
            run.page_size = p.page_size
            run.shown = None if p.mask is None else self.unpack(run, p.mask)
        self.host(run)

    def host(self, run):
        """A wrong kernel may change the facts in `run` here."""

    def unpack(self, run, mask):
        """Unpack a draft mask: return bool [batch, q_len, q_len]."""
        words = mask.to(torch.int32)
        bits = (words.unsqueeze(-1) >> torch.arange(16, dtype=torch.int32)) & 1
        return bits.flatten(2)[:, :, : mask.shape[1]].bool()

    # ---- the walk over requests and rows
    def solve(self, run):
        self.begin(run)
        for r in range(run.batch):
            self.request(run, r)

    def begin(self, run):
        self.start(run)
        self.clear(run, slice(run.offsets[-1], None))

    def clear(self, run, rows):
        """Write the results of rows that see no key."""
        run.out[rows] = 0
        if run.lse is not None:
            run.lse[rows] = -math.inf

    def request(self, run, r):
        first, last = run.offsets[r : r + 2]
        if first == last:
            return
        at_once = max(1, SCORES_AT_ONCE // (run.p.num_qo_heads * max(run.lens[r], 1)))
        for start in range(first, last, at_once):
            self.rows(run, r, start, min(start + at_once, last))

    def rows(self, run, r, start, stop):
        row = torch.arange(start, stop) - run.offsets[r]
        position = self.positions(run, r, row)
        run.row = row
        a, b = self.span(run, r, position)
        keys, values = self.load(run, r, a, b)
        query = index(run.query, slice(start, stop)).to(run.dtype)
        seen = self.visible(run, r, row, position, torch.arange(a, b))
        out, lse = self.attend(run, r, query, keys, values, seen, self.sink_rows(run, r, position), position, a)
        self.store(run, r, start, stop, out, lse)

    def positions(self, run, r, row):
        if not run.is_ragged and run.p.num_visible is not None:
            return run.p.num_visible[run.offsets[r] + row].long() - 1
        return run.lens[r] - run.num_rows(r) + row

    def span(self, run, r, position):
        """Return the first key and the end of the keys that at least one row may see."""
        free = not run.causal or (not run.is_ragged and run.shown is not None)
        end = run.lens[r] if free else max(0, min(run.lens[r], int(position.max()) + 1))
        start = max(0, int(position.min()) - run.window) if run.window >= 0 else 0
        return min(start, end), end

    def visible(self, run, r, row, position, keys):
        rows = position.unsqueeze(1)
        seen = torch.ones(len(position), len(keys), dtype=torch.bool)
        if not run.is_ragged and run.shown is not None:
            q_len = run.shown.shape[1]
            drafted = keys - (run.lens[r] - q_len)
            seen = (drafted < 0) | run.shown[r][row][:, drafted.clamp(0, q_len - 1)]
        elif run.causal:
            seen = keys <= rows
        if run.window >= 0:
            seen = seen & (keys >= rows - run.window)
        return seen

    def without_window(self, run, r, row, position, keys):
        window, run.window = run.window, -1
        seen = Attention.visible(self, run, r, row, position, keys)
        run.window = window
        return seen

    def sink_rows(self, run, r, position):
        return None if run.sinks is None else run.sinks.expand(len(position), -1)

    # ---- K and V
    def load(self, run, r, a, b):
        if run.is_ragged:
            first = run.kv_offsets[r]
            return tuple(side[first + a : first + b].to(run.dtype) for side in (run.key, run.value))
        ps = run.page_size
        columns = torch.arange(a // ps, -(-b // ps))
        cut = slice(a - a // ps * ps, b - a // ps * ps)
        k_pages = self.pages_of(run, r, columns, "k")
        v_pages = self.pages_of(run, r, columns, "v")
        return self.entries(run, "k", k_pages, cut), self.entries(run, "v", v_pages, cut)

    def pages_of(self, run, r, columns, side):
        pages = run.table(side)[r, columns].long()
        return pages.clamp(0, len(run.k_cache) - 1) if self.forgiving else pages

    def entries(self, run, side, pages, cut):
        """Return the tokens in `cut` of whole pages, [tokens, heads, head_dim]."""
        got = index(run.cache(side), pages)
        if got.dtype == torch.uint8:
            got = dequantize_nvfp4(got, self.factors(run, side, pages, cut))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)

    def factors(self, run, side, pages, cut):
        """Return the scale factors of whole pages of an NVFP4 cache, e4m3 [pages, heads, page_size, factors]."""
        return index(run.p.k_scale_factors if side == "k" else run.v_factors, pages)

    # ---- arithmetic: shapes [rows, heads, ...]
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        return self.finish(run, self.partial(run, r, query, keys, values, seen, first_key), sinks)

    def scores(self, run, r, query, keys, seen, first_key):
        """Return logits [kv_heads, rows, group, keys], -inf where a row does not see the key."""
        rows, heads, _ = query.shape
        if run.head_map is not None:
            keys = keys[:, run.head_map]
        h = keys.shape[1]
        g = heads // h
        q = query.unflatten(1, (h, g)).transpose(0, 1).flatten(1, 2)
        s = (q @ keys.permute(1, 2, 0) * run.scale1).unflatten(1, (rows, g))
        s = s.masked_fill(~seen[None, :, None, :], -math.inf)
        return self.mask_scores(run, r, s, first_key)

    def mask_scores(self, run, r, s, first_key):
        return s

    def until(self, s, last, first_key):
        """Mask the keys after the last one, [rows, group], that a row of a head sees."""
        return s.masked_fill(first_key + torch.arange(s.shape[3]) > last.unsqueeze(2), -math.inf)

    def partial(self, run, r, query, keys, values, seen, first_key):
        """Return (sum of weights times V [rows, heads, dim], largest logit [rows, heads], sum of weights)."""
        if 0 < self.split < len(keys):
            parts = self.partials(self.split, run, r, query, keys, values, seen, first_key)
            return self.merged(run, r, parts)
        s = self.scores(run, r, query, keys, seen, first_key)
        if run.head_map is not None:
            values = values[:, run.head_map]
        rows, g = s.shape[1:3]
        largest = self.largest(run, s)
        origin = torch.where(largest.isfinite(), largest, 0.0)
        weights = torch.exp(s - origin.unsqueeze(3))
        total = self.denominator(run, s, weights, largest)
        acc = (self.operand(run, weights).flatten(1, 2) @ values.transpose(0, 1)).unflatten(1, (rows, g))
        return by_row(acc, largest, total)

    def partials(self, size, run, r, query, keys, values, seen, first_key):
        """Return the partial results of parts of `size` keys, at least one."""
        cuts = [slice(at, at + size) for at in range(0, max(len(keys), 1), size)]
        return [self.partial_of(cut, run, r, query, keys, values, seen, first_key) for cut in cuts]

    def partial_of(self, cut, run, r, query, keys, values, seen, first_key):
        """Return the right partial result of some of the keys."""
        return Attention.partial(
            self, run, r, query, keys[cut], values[cut], seen[:, cut], first_key + (cut.start or 0)
        )

    def largest(self, run, s):
        """Return the logit that weights are relative to, [kv_heads, rows, group]: the largest, -inf without keys."""
        return s.amax(3) if s.shape[3] else s.new_full(s.shape[:3], -math.inf)

    def denominator(self, run, s, weights, largest):
        return weights.sum(3)

    def operand(self, run, weights):
        return weights

    def finish(self, run, partial, sinks):
        acc, largest, total = partial
        new = largest if sinks is None else torch.maximum(largest, sinks)
        origin = torch.where(new.isfinite(), new, 0.0)
        factor = torch.exp(torch.where(largest.isfinite(), largest, 0.0) - origin)
        factor = torch.where(total > 0, factor, 0.0)
        total = torch.where(total > 0, total * factor, 0.0)
        if sinks is not None:
            total = total + torch.exp(sinks - origin)
        out = acc * (factor / torch.where(total > 0, total, 1.0)).unsqueeze(2) * run.scale2
        lse = torch.where(total > 0, (origin + torch.log(total)) / math.log(2.0), -math.inf)
        return out, lse

    def merged(self, run, r, partials):
        """Return the partial result of several parts of the keys."""
        return self.merge(partials)

    def merge(self, partials):
        """Merge partial results of the same rows."""
        largest = torch.stack([m for _, m, _ in partials]).amax(0)
        origin = torch.where(largest.isfinite(), largest, 0.0)
        acc = total = 0
        for a, m, l in partials:
            factor = torch.where(m.isfinite(), torch.exp(m - origin), 0.0)
            acc, total = acc + a * factor.unsqueeze(2), total + l * factor
        return acc, largest, total

    # ---- results of rows, by their numbers in the request
    def store(self, run, r, start, stop, out, lse):
        row = torch.arange(start, stop) - run.offsets[r]
        lost = self.lost(run, r, row).reshape(len(row), -1)
        out = self.stored_out(run, r, row, out).masked_fill(lost.unsqueeze(2), 0.0)
        run.out[start:stop] = saturated(out, run.out.dtype)
        if run.lse is not None:
            run.lse[start:stop] = self.stored_lse(run, r, row, lse).masked_fill(lost, -math.inf).to(run.lse.dtype)

    def lost(self, run, r, row):
        """Return the results that are left zero, with an LSE of minus infinity: bool [rows] or [rows, heads]."""
        return torch.zeros(len(row), dtype=torch.bool)

    def stored_out(self, run, r, row, out):
        return out

    def stored_lse(self, run, r, row, lse):
        return lse
