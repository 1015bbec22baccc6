"""Right kernels of the four attention calls, which the judge must accept.

    lab judge corpus.right:two_passes

The kernels differ in their arithmetic: in roundings, in the order in which keys are summed, and in the place where scales are
applied.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from corpus.models.attention import E4M3, Attention

LN2 = math.log(2.0)


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of one request, and the keys that at least one of them sees. A row here is a query row of one head of a group.

    Attributes:
        query: float32 [num_kv_heads, num_rows, head_dim].
        keys, values: float32 [num_kv_heads, num_keys, ...]; an NVFP4 cache is dequantised.
        visible: bool [num_rows, num_keys].
        sinks: float32 [num_kv_heads, num_rows], -inf without sinks.
        half: the query's dtype; bfloat16 for an e4m3 query.
        is_quantised: True if the values' dtype differs from the query's.
        threshold: weights below it may be left out, where the largest weight of a row is 1.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor
    bmm1_scale: float
    bmm2_scale: float
    sinks: Tensor
    half: torch.dtype
    is_quantised: bool
    threshold: float

    def scores(self) -> Tensor:
        """Return the logits, float32 [num_kv_heads, num_rows, num_keys]; -inf for keys that a row does not see."""
        products = self.query @ self.keys.transpose(1, 2)
        return (products * self.bmm1_scale).masked_fill(~self.visible, -math.inf)

    def over(self, keys: slice) -> "Part":
        return replace(
            self,
            keys=self.keys[:, keys],
            values=self.values[:, keys],
            visible=self.visible[:, keys],
            sinks=torch.full_like(self.sinks, -math.inf),
        )


class RightKernel(Attention):
    """A right kernel. Subclasses differ in the arithmetic of `attended`."""

    def attended(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return out [num_kv_heads, num_rows, v_head_dim] and the LSE [num_kv_heads, num_rows], float32, base e."""
        raise NotImplementedError

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        def by_group(side):
            return side.float().unflatten(1, (-1, run.group)).transpose(0, 1).flatten(1, 2)

        sinks = query.new_full(query.shape[:2], -math.inf) if sinks is None else sinks
        keys, values = (side.float().transpose(0, 1) for side in (keys, values))
        dtype, stored = run.p.query.dtype, (run.value if run.is_ragged else run.v_cache).dtype
        part = Part(
            by_group(query),
            keys,
            values,
            seen.repeat_interleave(run.group, dim=0),
            run.scale1,
            run.scale2,
            by_group(sinks),
            torch.bfloat16 if dtype == E4M3 else dtype,
            stored != dtype,
            run.p.skip_softmax / max(int(run.p.kv_lens()[r]), 1),
        )
        nothing = part.sinks.new_zeros(*part.sinks.shape, values.shape[2]), part.sinks
        out, lse = self.attended(part) if keys.shape[1] else nothing
        out, lse = (side.unflatten(1, (-1, run.group)).transpose(0, 1).flatten(1, 2) for side in (out, lse))
        return out, lse / LN2


def _finite(origin: Tensor) -> Tensor:
    """Replace -inf by 0 in the origin of exponentials, for rows that have seen no key: -inf - -inf would be NaN."""
    return torch.where(origin.isfinite(), origin, 0.0)


def _quotient(sums: Tensor, total: Tensor) -> Tensor:
    return sums / torch.where(total == 0, 1.0, total).unsqueeze(-1)


class FromTorch(RightKernel):
    """Torch's attention function in float32. A sink is an additional key whose value is zero."""

    def attended(self, part: Part) -> tuple[Tensor, Tensor]:
        keys, values = (torch.nn.functional.pad(side, (0, 0, 0, 1)) for side in (part.keys, part.values))
        bias = torch.zeros(len(part.visible), 1, device=part.sinks.device)
        bias = torch.cat((bias.new_zeros(part.visible.shape).masked_fill(~part.visible, -math.inf), bias), dim=1)
        bias = bias.expand(len(keys), -1, -1).clone()
        bias[..., -1] = part.sinks
        query = part.query * part.bmm1_scale
        sees = (bias != -math.inf).any(dim=-1, keepdim=True)
        lse = (query @ keys.transpose(1, 2) + bias).logsumexp(dim=-1)
        bias = torch.where(sees, bias, 0.0)
        out = torch.nn.functional.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=bias[None], scale=1.0
        )[0]
        return torch.where(sees, out, 0.0) * part.bmm2_scale, lse


class AtOnce(RightKernel):
    """One softmax over all keys, in float32."""

    def attended(self, part: Part) -> tuple[Tensor, Tensor]:
        scores = part.scores()
        origin = _finite(torch.maximum(scores.amax(dim=-1), part.sinks))
        weights = torch.exp(scores - origin.unsqueeze(-1))
        total = weights.sum(dim=-1) + torch.exp(part.sinks - origin)
        return self.summed(part, weights, total) * part.bmm2_scale, origin + torch.log(total)

    def summed(self, part: Part, weights: Tensor, total: Tensor) -> Tensor:
        """Return the output before bmm2_scale, from the weights relative to the largest weight, and from their sum."""
        return _quotient(weights @ part.values, total)


class WeightsRounded(AtOnce):
    """The weights, relative to the largest weight, are summed and then rounded to the query's dtype."""

    def summed(self, part: Part, weights: Tensor, total: Tensor) -> Tensor:
        return super().summed(part, weights.to(part.half).float(), total)


class ProbabilitiesRounded(AtOnce):
    """Normalised weights are rounded to the query's dtype. They sum to 2**14, because float16 cannot hold the small weights of
    long requests if they sum to 1.
    """

    def summed(self, part: Part, weights: Tensor, total: Tensor) -> Tensor:
        weights = (_quotient(weights, total) * 2.0**14).to(part.half).float()
        return weights @ part.values / 2.0**14


class ScalesFirst(AtOnce):
    """bmm1_scale multiplies the query and bmm2_scale the values, in float32, before either product."""

    def attended(self, part: Part) -> tuple[Tensor, Tensor]:
        query, values = part.query * part.bmm1_scale, part.values * part.bmm2_scale
        return super().attended(replace(part, query=query, values=values, bmm1_scale=1.0, bmm2_scale=1.0))


class DequantisedFirst(WeightsRounded):
    """The values of a quantised cache are multiplied by bmm2_scale and rounded to the query's dtype before the product."""

    def attended(self, part: Part) -> tuple[Tensor, Tensor]:
        if not part.is_quantised:
            return super().attended(part)
        values = (part.values * part.bmm2_scale).to(part.half).float()
        return super().attended(replace(part, values=values, bmm2_scale=1.0))


class Split(AtOnce):
    """The keys are divided into seven splits, whose outputs are merged by their LSEs."""

    def slices(self, num_keys: int) -> list[slice]:
        size = -(-num_keys // 7)
        return [slice(start, start + size) for start in range(0, num_keys, size)]

    def attended(self, part: Part) -> tuple[Tensor, Tensor]:
        splits = [super(Split, self).attended(part.over(keys)) for keys in self.slices(part.keys.shape[1])]
        lses = torch.stack([lse for _, lse in splits] + [part.sinks])
        lse = lses.logsumexp(dim=0)
        shares = torch.exp(lses[:-1] - _finite(lse)).unsqueeze(-1)
        return (shares * torch.stack([self.stored(part, out) for out, _ in splits])).sum(dim=0), lse

    def stored(self, part: Part, out: Tensor) -> Tensor:
        """Return a split's output in the form that the merge reads."""
        return out


class SplitsRounded(Split):
    """The outputs of splits are rounded to the query's dtype before they are merged."""

    def stored(self, part: Part, out: Tensor) -> Tensor:
        return out.to(part.half).float()


class Tiles(RightKernel):
    """The keys are processed in tiles with a running maximum, bf16 operands and float32 sums."""

    size = 64
    reverse = False
    in_base_2 = False
    rounds_weights = True

    def attended(self, part: Part) -> tuple[Tensor, Tensor]:
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
            weights = weights.to(part.half).float() if self.rounds_weights else weights
            sums = sums * share.unsqueeze(-1) + weights @ tile.values
            largest = larger
        return _quotient(sums, total) * part.bmm2_scale, _finite(largest) + torch.log(total)

    def first_maximum(self, part: Part) -> Tensor:
        return part.sinks

    def exponential(self, difference: Tensor) -> Tensor:
        return torch.exp2(difference * (1 / LN2)) if self.in_base_2 else torch.exp(difference)


class SkippedKeys(Tiles):
    """All keys are left out that skip-softmax allows to leave out in all K/V heads."""

    def attended(self, part: Part) -> tuple[Tensor, Tensor]:
        scores = part.scores()
        weights = torch.exp(scores - _finite(scores.amax(dim=-1, keepdim=True)))
        left_out = (weights < min(part.threshold, 1.0)).all(dim=0)
        return super().attended(replace(part, visible=part.visible & ~left_out))


class PagesByNumber(Tiles):
    """Keys are summed in the order of their pages' numbers, so that the rounding depends on where the pages lie."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        if not run.is_ragged and len(keys):
            columns = (first_key + torch.arange(len(keys), device=keys.device)) // run.page_size
            order = run.k_table[r, columns].argsort(stable=True)
            keys, values, seen = keys[order], values[order], seen[:, order]
        return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)


class TwoPasses(Tiles):
    """The first pass over the tiles finds the largest logit; the second pass sums."""

    rounds_weights = False

    def first_maximum(self, part: Part) -> Tensor:
        largest = part.sinks
        for start in range(0, part.keys.shape[1], self.size):
            scores = part.over(slice(start, start + self.size)).scores()
            largest = torch.maximum(largest, scores.amax(dim=-1))
        return largest


class UnequalSplits(Split):
    """The keys are divided into two unequal splits, whose normalised results are merged by their LSEs."""

    def slices(self, num_keys: int) -> list[slice]:
        cut = -(-num_keys // 3)
        return [keys for keys in (slice(0, cut), slice(cut, num_keys)) if keys.start < keys.stop]


class HeadsOneByOne(Attention):
    """Softmax in base 2, with log2(e) multiplied into the query's scale. The heads of a group are processed one by one."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        log2e = 1.0 / math.log(2.0)
        q = (query * (run.scale1 * log2e)).unflatten(1, (run.num_kv_heads, run.group))
        hidden = ~seen.unsqueeze(0)
        outs, lses = [], []
        for g in range(run.group):
            s = (q[:, :, g].transpose(0, 1) @ keys.permute(1, 2, 0)).masked_fill(
                hidden, -math.inf
            )  # [kv_heads, rows, keys]
            largest = s.amax(2, keepdim=True) if len(keys) else s.new_full((*s.shape[:2], 1), -math.inf)
            sink = None if sinks is None else sinks.unflatten(1, (-1, run.group))[:, :, g].t().unsqueeze(2) * log2e
            if sink is not None:
                largest = torch.maximum(largest, sink)
            largest = torch.where(largest.isfinite(), largest, 0.0)
            weights = torch.exp2(s - largest)
            total = weights.sum(2, keepdim=True)
            if sink is not None:
                total = total + torch.exp2(sink - largest)
            outs.append((weights / torch.where(total > 0, total, 1.0)) @ values.transpose(0, 1))
            lses.append((largest + torch.log2(total)).squeeze(2))
        out, lse = torch.stack(outs, 1).flatten(0, 1), torch.stack(lses, 1).flatten(0, 1)
        return out.transpose(0, 1) * run.scale2, lse.t()


class NormalisedWeights(RightKernel):
    """The first pass computes the LSE of all keys in tiles of 96. The second pass multiplies normalised weights by V, tile by
    tile.
    """

    def attended(self, part: Part) -> tuple[Tensor, Tensor]:
        tiles = [part.over(slice(start, start + 96)) for start in range(0, part.keys.shape[1], 96)]
        lse, out = part.sinks, part.sinks.new_zeros(())
        for tile in tiles:
            lse = torch.logaddexp(lse, tile.scores().logsumexp(dim=-1))
        for tile in tiles:
            out = out + torch.exp(tile.scores() - _finite(lse).unsqueeze(-1)) @ tile.values
        return out * part.bmm2_scale, lse


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
pages_by_number = PagesByNumber()
two_passes = TwoPasses()
skipped_keys = SkippedKeys()
tiles_of_64 = Tiles()
dequantised_first = DequantisedFirst()
scales_first = ScalesFirst()
unequal_splits = UnequalSplits()
heads_one_by_one = HeadsOneByOne()
normalised_weights = NormalisedWeights()

KERNELS = {name: kernel for name, kernel in globals().items() if isinstance(kernel, Attention)}
