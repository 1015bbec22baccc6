"""Right attention kernels, written differently, of which a judge must say that they are right.

`lab judge tests/checks/right_kernels.py:two_passes` judges one of them.

All gather the tokens of one request from their pages and take every argument of FlashInfer's four calls. They differ in their
arithmetic: what is rounded, in which order keys are summed, when scales are applied.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lab.calls import ContextCall, DecodeCall, MLADecodeCall, PagedAttention, RaggedAttention, RaggedContextCall, takes
from lab.references.quantization import deinterleave_v_scale_factors, dequantize_nvfp4, rounded

SCORES_AT_ONCE = 2**24
E4M3 = torch.float8_e4m3fn
LN2 = math.log(2.0)


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of one request, and the keys that any of them sees. A row here is a query row of one head of a group.

    Attributes:
        query: [num_kv_heads, num_rows, head_dim], as handed out.
        keys, values: [num_kv_heads, num_keys, ...], as stored; those of an NVFP4 cache are dequantised.
        visible: bool [num_rows, num_keys].
        bmm1_scale, bmm2_scale: float32, without dimensions.
        sinks: float32 [num_kv_heads, num_rows], -inf where there is none.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor
    bmm1_scale: Tensor
    bmm2_scale: Tensor
    sinks: Tensor

    @property
    def half(self) -> torch.dtype:
        """The query's dtype, bfloat16 for e4m3."""
        return torch.bfloat16 if self.query.dtype == E4M3 else self.query.dtype

    def scores(self) -> Tensor:
        """Logits, float32 [num_kv_heads, num_rows, num_keys], -inf where a key is not visible."""
        products = self.query.to(torch.float32) @ self.keys.to(torch.float32).transpose(1, 2)
        return (products * self.bmm1_scale).masked_fill(~self.visible, -math.inf)

    def over(self, keys: slice) -> "Part":
        """Return the rows over some of the keys, without sinks."""
        return replace(
            self,
            keys=self.keys[:, keys],
            values=self.values[:, keys],
            visible=self.visible[:, keys],
            sinks=torch.full_like(self.sinks, -math.inf),
        )


class RightKernel:
    """FlashInfer's four calls; `attend` is the arithmetic in which kernels differ."""

    def __init__(self) -> None:
        self.trtllm_batch_decode_with_kv_cache = takes(DecodeCall)(self._call)
        self.trtllm_batch_context_with_kv_cache = takes(ContextCall)(self._call)
        self.trtllm_batch_decode_with_kv_cache_mla = takes(MLADecodeCall)(self._mla)
        self.trtllm_ragged_attention_deepseek = takes(RaggedContextCall)(self._call)

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return out [num_kv_heads, num_rows, v_head_dim] and the LSE [num_kv_heads, num_rows], float32, base e."""
        raise NotImplementedError

    def _call(self, call: Any) -> Any:
        problem = call.problem()
        return problem.returned(*self._solve(problem))

    def _mla(self, call: MLADecodeCall) -> Any:
        out, lse = self._solve(call.problem())
        if lse is not None and call.return_lse_base == "basee":
            lse *= LN2
        return call.returned(out, lse)

    def _solve(self, problem: PagedAttention | RaggedAttention) -> tuple[Tensor, Tensor | None]:
        out, lse_log2 = problem.results()
        offsets = problem.row_offsets() if not problem.has_no_rows else [0]
        out[offsets[-1] :] = 0
        if lse_log2 is not None:
            lse_log2[offsets[-1] :] = -math.inf
        for request, (start, end) in enumerate(itertools.pairwise(offsets)):
            for rows, part in _parts(problem, request, start, end):
                values, lse = self.attend(part) if part.visible.shape[1] else _nothing(part)
                group = problem.num_qo_heads // problem.num_kv_heads
                values, lse = (side.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2) for side in (values, lse))
                out[rows] = rounded(values, out.dtype)
                if lse_log2 is not None:
                    lse_log2[rows] = lse / LN2
        return out, lse_log2


def _nothing(part: Part) -> tuple[Tensor, Tensor]:
    """Rows without a key: their LSE is their sink's."""
    return part.sinks.new_zeros(*part.sinks.shape, part.values.shape[2]), part.sinks


def _parts(
    problem: PagedAttention | RaggedAttention, request: int, start: int, end: int
) -> Iterator[tuple[slice, Part]]:
    """Yield rows of a request, few enough that their scores fit."""
    kv_len = int(problem.seq_lens[request])
    at_once = max(1, SCORES_AT_ONCE // (problem.num_qo_heads * max(kv_len, 1)))
    for first in range(start, end, at_once):
        rows = slice(first, min(first + at_once, end))
        yield rows, _part(problem, request, rows, start, kv_len - (end - start) + first - start, kv_len)


def _part(
    problem: PagedAttention | RaggedAttention, request: int, rows: slice, start: int, position: int, kv_len: int
) -> Part:
    """The rows of a slice, of which the first is at a position of the request whose first row is `start`."""
    device = problem.query.device
    positions = torch.arange(position, position + rows.stop - rows.start, device=device).unsqueeze(1)
    mask = problem.mask if isinstance(problem, PagedAttention) else None
    last = kv_len if mask is not None or not problem.causal else max(0, position + rows.stop - rows.start)
    first = min(max(0, position - problem.window_left) if problem.window_left >= 0 else 0, last)
    keys = torch.arange(first, last, device=device)
    visible = (
        (keys >= positions - problem.window_left)
        if problem.window_left >= 0
        else (keys >= 0).expand(len(positions), -1)
    )
    if mask is not None:
        visible = visible & _shown(
            mask[request], problem.max_q_len, slice(rows.start - start, rows.stop - start), keys - kv_len
        )
    elif problem.causal:
        visible = visible & (keys <= positions)
    group = problem.num_qo_heads // problem.num_kv_heads
    sinks = torch.full((problem.num_qo_heads,), -math.inf, device=device) if problem.sinks is None else problem.sinks
    query = problem.query[rows].unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)
    as_number = {"dtype": torch.float32, "device": device}
    return Part(
        query,
        *_tokens(problem, request, keys),
        visible.repeat_interleave(group, dim=0),
        torch.as_tensor(problem.bmm1_scale, **as_number).reshape(()),
        torch.as_tensor(problem.bmm2_scale, **as_number).reshape(()),
        sinks.view(-1, group).repeat(1, len(positions)),
    )


def _shown(words: Tensor, q_len: int, rows: slice, from_end: Tensor) -> Tensor:
    """bool [num_rows, num_keys], by a packed mask's words, of keys that lie so many before the request's end."""
    bits = words[rows].to(torch.int32).unsqueeze(2) >> torch.arange(16, device=words.device, dtype=torch.int32)
    draft_tokens = from_end + q_len
    return (bits & 1).flatten(1).bool()[:, draft_tokens.clamp(min=0)] | (draft_tokens < 0)


def _tokens(problem: PagedAttention | RaggedAttention, request: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """K and V at positions of a request, [num_kv_heads, num_keys, ...]."""
    if isinstance(problem, RaggedAttention):
        index = problem.cu_seqlens_kv[request] + keys
        k, v = (_indexed(side, index) for side in (problem.key, problem.value))
        return k.transpose(0, 1), v.transpose(0, 1)
    v_factors = problem.v_scale_factors
    if v_factors is not None and problem.v_scale_factors_interleaved:
        v_factors = deinterleave_v_scale_factors(v_factors.view(torch.uint8)).view(E4M3)
    sides = (
        (problem.k_cache, problem.k_scale_factors, problem.k_block_tables),
        (problem.v_cache, v_factors, problem.v_block_tables),
    )
    found = []
    for cache, factors, tables in sides:
        index = (tables[request][keys // problem.page_size].long(), slice(None), keys % problem.page_size)
        tokens = _indexed(cache, index)
        if factors is not None:
            tokens = dequantize_nvfp4(tokens, _indexed(factors, index)).to(torch.float32)  # exact
        found.append(tokens.transpose(0, 1))
    return found[0], found[1]


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    return tensor.view(torch.uint8)[index].view(E4M3) if tensor.dtype == E4M3 else tensor[index]


def _finite(origin: Tensor) -> Tensor:
    """An origin of exponentials: 0 where a row has seen no key, since -inf - -inf would be NaN."""
    return torch.where(origin.isfinite(), origin, 0.0)


def _quotient(sums: Tensor, total: Tensor) -> Tensor:
    return sums / torch.where(total == 0, 1.0, total).unsqueeze(-1)


class FromTorch(RightKernel):
    """torch's own attention in float32; a sink is one more key, of value zero."""

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        keys, values = (
            torch.nn.functional.pad(side.to(torch.float32), (0, 0, 0, 1)) for side in (part.keys, part.values)
        )
        bias = torch.zeros(len(part.visible), 1, device=part.sinks.device)
        bias = torch.cat((bias.new_zeros(part.visible.shape).masked_fill(~part.visible, -math.inf), bias), dim=1)
        bias = bias.expand(len(keys), -1, -1).clone()
        bias[..., -1] = part.sinks
        query = part.query.to(torch.float32) * part.bmm1_scale
        sees = (bias != -math.inf).any(dim=-1, keepdim=True)
        lse = (query @ keys.transpose(1, 2) + bias).logsumexp(dim=-1)
        bias = torch.where(sees, bias, 0.0)
        out = torch.nn.functional.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=bias[None], scale=1.0
        )[0]
        return torch.where(sees, out, 0.0) * part.bmm2_scale, lse


class AtOnce(RightKernel):
    """All keys at once, in float32."""

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        scores = part.scores()
        origin = _finite(torch.maximum(scores.amax(dim=-1), part.sinks))
        weights = torch.exp(scores - origin.unsqueeze(-1))
        total = weights.sum(dim=-1) + torch.exp(part.sinks - origin)
        return self.summed(part, weights, total) * part.bmm2_scale, origin + torch.log(total)

    def summed(self, part: Part, weights: Tensor, total: Tensor) -> Tensor:
        """Return the output before bmm2_scale, from weights relative to the largest and their sum."""
        return _quotient(weights @ part.values.to(torch.float32), total)


class WeightsRounded(AtOnce):
    """Weights relative to the largest are rounded to the query's dtype, after they are summed."""

    def summed(self, part: Part, weights: Tensor, total: Tensor) -> Tensor:
        return super().summed(part, weights.to(part.half).to(torch.float32), total)


class ProbabilitiesRounded(AtOnce):
    """Weights that add up to 2**14 are rounded to the query's dtype: to 1, float16 would not hold those of long requests."""

    def summed(self, part: Part, weights: Tensor, total: Tensor) -> Tensor:
        weights = (_quotient(weights, total) * 2.0**14).to(part.half).to(torch.float32)
        return weights @ part.values.to(torch.float32) / 2.0**14


class ScalesFirst(AtOnce):
    """bmm1_scale multiplies the query and bmm2_scale the values, in float32, before either product."""

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(part.bmm1_scale)
        query, values = part.query.to(torch.float32) * part.bmm1_scale, part.values.to(torch.float32) * part.bmm2_scale
        return super().attend(replace(part, query=query, values=values, bmm1_scale=one, bmm2_scale=one))


class DequantisedFirst(WeightsRounded):
    """Values of a quantised cache are multiplied by bmm2_scale and rounded to the query's dtype first."""

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        if part.values.dtype == part.query.dtype:
            return super().attend(part)
        values = (part.values.to(torch.float32) * part.bmm2_scale).to(part.half)
        return super().attend(replace(part, values=values, bmm2_scale=torch.ones_like(part.bmm2_scale)))


class Split(AtOnce):
    """Keys in seven splits, each with an output of its own; their LSEs merge them."""

    num_splits = 7

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        size = -(-part.keys.shape[1] // self.num_splits)
        starts = range(0, part.keys.shape[1], size)
        splits = [super(Split, self).attend(part.over(slice(start, start + size))) for start in starts]
        lses = torch.stack([lse for _, lse in splits] + [part.sinks])
        lse = lses.logsumexp(dim=0)
        shares = torch.exp(lses[:-1] - _finite(lse)).unsqueeze(-1)
        return (shares * torch.stack([self.stored(part, out) for out, _ in splits])).sum(dim=0), lse

    def stored(self, part: Part, out: Tensor) -> Tensor:
        """Return a split's output as the merge reads it."""
        return out


class SplitsRounded(Split):
    """The outputs of splits are rounded to the query's dtype before they are merged."""

    def stored(self, part: Part, out: Tensor) -> Tensor:
        return out.to(part.half).to(torch.float32)


class Tiles(RightKernel):
    """Keys in tiles, with a running maximum: bf16 operands, float32 sums."""

    size = 64
    reverse = False
    in_base_2 = False
    rounds_weights = True

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        starts = range(0, part.keys.shape[1], self.size)
        largest = self.first_maximum(part)
        total = torch.exp(part.sinks - _finite(largest))
        sums = part.sinks.new_zeros(*part.sinks.shape, part.values.shape[2])
        for start in reversed(starts) if self.reverse else starts:
            tile = part.over(slice(start, start + self.size))
            scores = tile.scores()
            larger = torch.maximum(largest, scores.amax(dim=-1))
            share = self.exponential(largest - _finite(larger))
            weights = self.exponential(scores - _finite(larger).unsqueeze(-1))
            total = total * share + weights.sum(dim=-1)
            weights = weights.to(part.half).to(torch.float32) if self.rounds_weights else weights
            sums = sums * share.unsqueeze(-1) + weights @ tile.values.to(torch.float32)
            largest = larger
        return _quotient(sums, total) * part.bmm2_scale, _finite(largest) + torch.log(total)

    def first_maximum(self, part: Part) -> Tensor:
        """Return the maximum before the first tile."""
        return part.sinks

    def exponential(self, difference: Tensor) -> Tensor:
        return torch.exp2(difference * (1 / LN2)) if self.in_base_2 else torch.exp(difference)


class TwoPasses(Tiles):
    """A first pass over the tiles finds the largest logit, a second one sums."""

    rounds_weights = False

    def first_maximum(self, part: Part) -> Tensor:
        largest = part.sinks
        for start in range(0, part.keys.shape[1], self.size):
            scores = part.over(slice(start, start + self.size)).scores()
            largest = torch.maximum(largest, scores.amax(dim=-1))
        return largest


def _tiles(**attributes: Any) -> Tiles:
    kernel = Tiles()
    vars(kernel).update(attributes)
    return kernel


from_torch = FromTorch()
reversed_tiles = _tiles(size=128, reverse=True, rounds_weights=False)
split_and_merged = Split()
splits_rounded = SplitsRounded()
weights_rounded = WeightsRounded()
probabilities_rounded = ProbabilitiesRounded()
base_2 = _tiles(size=256, in_base_2=True)
two_passes = TwoPasses()
tiles_of_64 = Tiles()
dequantised_first = DequantisedFirst()
scales_first = ScalesFirst()

KERNELS = {name: kernel for name, kernel in globals().items() if isinstance(kernel, RightKernel)}
