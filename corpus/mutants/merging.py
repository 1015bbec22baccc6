"""Mutants that merge splits, sums and sinks wrongly."""

import torch
from torch import Tensor

from corpus.mutants.mutant import DECODE
from corpus.mutants.split_kv import Partials, Rows, RowTile, SplitKV, partials_size
from lab.calls.problem import PagedAttention


class EmptySplitWritesZero(SplitKV, source="FlashInfer #4161"):
    """A split of 64 keys that lies wholly before a window writes zeros over the merged rows."""

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        rows.values[:] *= tile.key_start < 64


class EmptyRowOfSplitWritesZero(SplitKV, source="FlashInfer #4161"):
    """A row that sees no key of a split which other rows see is zero."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> Rows:
        values, lse_log2 = super().merged(problem, tile, partials)
        return Rows(values * (partials.total > 0).all(dim=-1).transpose(0, 1).unsqueeze(-1), lse_log2)


class PartialstatsOverlap(SplitKV, source="FlashInfer #3343"):
    """The scratch has room for the statistics of one K/V head's query heads; the sums begin after them."""

    def layout(self, problem: PagedAttention, tile: RowTile, scratch: Tensor) -> Partials:
        right = super().layout(problem, tile, scratch)
        start = 2 * right.largest.numel() // problem.num_kv_heads
        sums = scratch[start : partials_size(problem, tile)][: right.sums.numel()]
        return right._replace(sums=sums.view(right.sums.shape))


class MergedWithoutRescale(SplitKV, mla=True):
    """Splits are added as they are, whatever their largest logits."""

    def shares(self, partials: Partials, origin: Tensor) -> Tensor:
        return torch.exp(partials.largest[..., :1] - origin.unsqueeze(-1)).expand_as(partials.largest)


class MergedAsMean(SplitKV, mla=True):
    """The rows of a request's splits are averaged, whatever their sums of weights."""

    def shares(self, partials: Partials, origin: Tensor) -> Tensor:
        return torch.where(partials.total > 0, 1.0 / partials.total, 0.0)

    def sink_weight(self, problem: PagedAttention, tile: RowTile, sinks: Tensor, origin: Tensor) -> Tensor:
        return torch.zeros_like(origin)


class LateSplitsLost(SplitKV):
    """The merge reads 16 splits: keys after the first 1,024 are lost."""

    room = 16

    def shares(self, partials: Partials, origin: Tensor) -> Tensor:
        shares = super().shares(partials, origin)
        shares[..., self.room :] = 0.0
        return shares


class LastSplitLost(SplitKV, mla=True):
    """Of several splits, the last is merged only if it is full."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> Rows:
        if tile.num_splits > 1 and tile.key_end % 64:
            partials = Partials(*(part[:, :, :-1] for part in partials))
        return super().merged(problem, tile, partials)


class SinkIgnored(SplitKV, mla=True, source="SGLang #36716", instead={"sinks": None}):
    """Sinks are ignored."""


class SinkIgnoredInVerify(
    SplitKV, interface=(DECODE,), instead={"sinks": lambda problem: problem.sinks if problem.max_q_len == 1 else None}
):
    """Sinks are ignored where a decode call has several rows per request."""


class SinkPerSplit(
    SplitKV, mla=True, source="TRT-LLM #18141", sink_weight=lambda weight, _, tile, *__: weight * tile.num_splits
):
    """A sink is added once per split."""


class SinkOfNextHead(
    SplitKV, mla=True, sinks=lambda _, problem: None if problem.sinks is None else problem.sinks.roll(1)
):
    """A head has its neighbour's sink."""


class SinkOfKvHead(SplitKV):
    """The sinks of the first K/V head's group serve every group."""

    def sinks(self, problem: PagedAttention) -> Tensor | None:
        if problem.sinks is None:
            return None
        heads = torch.arange(problem.num_qo_heads, device=problem.sinks.device)
        return problem.sinks[heads % (problem.num_qo_heads // problem.num_kv_heads)]


class SinkScaled(
    SplitKV, mla=True, sinks=lambda _, problem: None if problem.sinks is None else problem.sinks * problem.bmm1_scale
):
    """A sink is multiplied by bmm1_scale, as if it were a product of query and key."""


class SinkInBase2(SplitKV, mla=True):
    """A sink is taken for a logit in base 2."""

    def sink_weight(self, problem: PagedAttention, tile: RowTile, sinks: Tensor, origin: Tensor) -> Tensor:
        return torch.exp2(sinks - origin)


class SinkRelativeToLargest(SplitKV):
    """A sink adds exp(sink - largest logit) with the largest of the keys alone, cut at the exponential of 8."""

    def sink_weight(self, problem: PagedAttention, tile: RowTile, sinks: Tensor, origin: Tensor) -> Tensor:
        return super().sink_weight(problem, tile, sinks.clamp(max=8.0), origin)


class LowPrecisionAccumulation(SplitKV, source="FlashInfer #3234"):
    """Splits are added one after the other in bfloat16, so that the error grows with the length."""

    def summed(self, partials: Partials, shares: Tensor) -> tuple[Tensor, Tensor]:
        total, sums = (side.select(2, 0) * 0 for side in partials[1:])
        for split in range(shares.shape[2]):
            share = shares[:, :, split]
            total = (total + share * partials.total[:, :, split]).bfloat16().float()
            sums = (sums + share.unsqueeze(-1) * partials.sums[:, :, split]).bfloat16().float()
        return total, sums


class LightKeysLost(SplitKV, mla=True, weights=lambda weights, *_: weights * (weights >= 0.01)):
    """A key that weighs less than a hundredth of its split's heaviest is dropped."""


class LightSplitsLost(
    SplitKV, mla=True, source="FlashInfer #3299", shares=lambda shares, *_: shares * (shares > 0.0067)
):
    """A split whose largest logit is 5 below the row's is dropped."""


class OverflowsWithoutOrigin(SplitKV, mla=True):
    """Weights are exponentials of the logits themselves: those above 88 overflow."""

    def weights(self, scores: Tensor, largest: Tensor) -> Tensor:
        return torch.exp(scores) / torch.exp(torch.where(largest.isfinite(), largest, 0.0)).unsqueeze(-1)


class WeightsInHalf(SplitKV, weights=lambda weights, *_: weights.to(torch.float16).to(torch.float32)):
    """Weights are rounded to float16, which has none below 2**-24 of the largest."""


class NondeterministicMerge(SplitKV, mla=True, source="FlashInfer #4161"):
    """Every other launch rounds the sums of several splits to bfloat16 before it merges them."""

    launches = 0

    def changed(self, problem: PagedAttention) -> PagedAttention:
        self.launches += 1
        return problem

    def summed(self, partials: Partials, shares: Tensor) -> tuple[Tensor, Tensor]:
        if self.launches % 2 == 0:
            partials = partials._replace(sums=partials.sums.bfloat16().float())
        return super().summed(partials, shares)


class SplitsBeyond64Lost(LateSplitsLost, mla=True, room=64):
    """The merge has room for 64 splits."""


class PartialSumsInHalf(SplitKV, mla=True):
    """A split's sum of weighted values is kept in float16, before it is divided by the weights."""

    def partials(self, problem: PagedAttention, tile: RowTile) -> Partials:
        partials = super().partials(problem, tile)
        return partials._replace(sums=partials.sums.to(torch.float16).to(torch.float32))


class SinkIgnoredWithMask(SplitKV, interface=(DECODE,), instead={"sinks": None}, only_with="mask"):
    """Sinks are ignored where there is a draft mask."""


class SinkIgnoredOfRaggedRows(SplitKV, interface=(DECODE,), instead={"sinks": None}, only_with="cu_seqlens_q"):
    """Sinks are ignored where cum_seq_lens_q is given."""


class FirstSinkSwitchesAll(
    SplitKV, sinks=lambda sinks, *_: None if sinks is not None and float(sinks[0]) == -torch.inf else sinks
):
    """A first head without a sink, minus infinity, is taken for a layer without sinks."""


class NoSinkNoKeysNan(SplitKV):
    """A row that sees no key is NaN where its head's sink is minus infinity."""

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        if problem.sinks is not None:
            rows.values[rows.lse_log2 == -torch.inf] = torch.nan
