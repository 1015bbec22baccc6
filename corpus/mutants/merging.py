"""Mutants that merge splits, sums and sinks wrongly."""

import torch

from corpus.models.split_kv import Partials, Rows, SplitKV, partials_size
from corpus.wrong import DECODE, wrong


def _of_first(room, shares):
    """Return the weights of the first `room` splits, and zeros for the others."""
    return shares * (torch.arange(shares.shape[-1], device=shares.device) < room)


class Merging(SplitKV):
    empty_split_writes_zero = wrong(
        source="FlashInfer #4161", finish_tile=lambda _, p, tile, rows: rows.values.mul_(tile.key_start < 64)
    )("A split of 64 keys that lies wholly before a window writes zeros over the merged rows.")

    @wrong(stage="merged", source="FlashInfer #4161")
    def empty_row_of_split_writes_zero(self, problem, tile, partials):
        """A row that sees no key of a split which other rows see is zero."""
        values, lse_log2 = super().merged(problem, tile, partials)
        return Rows(values * (partials.total > 0).all(dim=-1).transpose(0, 1).unsqueeze(-1), lse_log2)

    @wrong(changes="layout", source="FlashInfer #3343")
    def partialstats_overlap(self, right, problem, tile, scratch):
        """The scratch has room for the statistics of one K/V head's query heads; the sums begin after them."""
        start = 2 * right.largest.numel() // problem.num_kv_heads
        sums = scratch[start : partials_size(problem, tile)][: right.sums.numel()]
        return right._replace(sums=sums.view(right.sums.shape))

    merged_without_rescale = wrong(mla=True, shares=lambda shares, *_: shares[..., :1].expand_as(shares))(
        "Splits are added as they are, whatever their largest logits."
    )

    @wrong(stage="merged", mla=True)
    def last_split_lost(self, problem, tile, partials):
        """Of several splits, the last is merged only if it is full."""
        if tile.num_splits > 1 and tile.key_end % 64:
            partials = Partials(*(part[:, :, :-1] for part in partials))
        return super().merged(problem, tile, partials)

    sink_ignored = wrong(mla=True, source="SGLang #36716", instead={"sinks": None})("Sinks are ignored.")
    sink_ignored_in_verify = wrong(DECODE, instead={"sinks": lambda p: p.sinks if p.max_q_len == 1 else None})(
        "Sinks are ignored where a decode call has several rows per request."
    )
    sink_per_split = wrong(
        mla=True, source="TRT-LLM #18141", sink_weight=lambda weight, _, tile, *__: weight * tile.num_splits
    )("A sink is added once per split.")
    sink_of_next_head = wrong(mla=True, sinks=lambda _, p: None if p.sinks is None else p.sinks.roll(1))(
        "A head has its neighbour's sink."
    )

    @wrong(stage="sinks")
    def sink_of_kv_head(self, problem):
        """The sinks of the first K/V head's group serve every group."""
        if problem.sinks is None:
            return None
        heads = torch.arange(problem.num_qo_heads, device=problem.sinks.device)
        return problem.sinks[heads % problem.group]

    sink_scaled = wrong(mla=True, sinks=lambda _, p: None if p.sinks is None else p.sinks * p.bmm1_scale)(
        "A sink is multiplied by bmm1_scale, as if it were a product of query and key."
    )
    sink_in_base2 = wrong(mla=True, sink_weight=lambda _, p, tile, sinks, origin: torch.exp2(sinks - origin))(
        "A sink is taken for a logit in base 2."
    )

    @wrong(stage="sink_weight")
    def sink_relative_to_largest(self, problem, tile, sinks, origin):
        """A sink adds exp(sink - largest logit) with the largest of the keys alone, cut at the exponential of 8."""
        return super().sink_weight(problem, tile, sinks.clamp(max=8.0), origin)

    @wrong(stage="summed", source="FlashInfer #3234")
    def low_precision_accumulation(self, partials, shares):
        """Splits are added one after the other in bfloat16, so that the error grows with the length."""
        total, sums = (side.select(2, 0) * 0 for side in partials[1:])
        for split in range(shares.shape[2]):
            share = shares[:, :, split]
            total = (total + share * partials.total[:, :, split]).bfloat16().float()
            sums = (sums + share.unsqueeze(-1) * partials.sums[:, :, split]).bfloat16().float()
        return total, sums

    light_keys_lost = wrong(mla=True, weights=lambda weights, *_: weights * (weights >= 0.01))(
        "A key that weighs less than a hundredth of its split's heaviest is dropped."
    )
    light_splits_lost = wrong(
        mla=True, source="FlashInfer #3299", shares=lambda shares, *_: shares * (shares > 0.0067)
    )("A split whose largest logit is 5 below the row's is dropped.")

    @wrong(stage="weights", mla=True)
    def overflows_without_origin(self, scores, largest):
        """Weights are exponentials of the logits themselves: those above 88 overflow."""
        return torch.exp(scores) / torch.exp(torch.where(largest.isfinite(), largest, 0.0)).unsqueeze(-1)

    late_splits_lost = wrong(shares=lambda shares, *_: _of_first(16, shares))(
        "The merge reads 16 splits: keys after the first 1,024 are lost."
    )
    splits_beyond64_lost = wrong(mla=True, shares=lambda shares, *_: _of_first(64, shares))(
        "The merge has room for 64 splits."
    )
    weights_in_half = wrong(weights=lambda weights, *_: weights.to(torch.float16).to(torch.float32))(
        "Weights are rounded to float16, which has none below 2**-24 of the largest."
    )

    @wrong(changes="partials", mla=True)
    def partial_sums_in_half(self, partials, problem, tile):
        """A split's sum of weighted values is kept in float16, before it is divided by the weights."""
        return partials._replace(sums=partials.sums.to(torch.float16).to(torch.float32))

    sink_ignored_with_mask = wrong(DECODE, instead={"sinks": None}, only_with="mask")(
        "Sinks are ignored where there is a draft mask."
    )
    sink_ignored_of_ragged_rows = wrong(DECODE, instead={"sinks": None}, only_with="cu_seqlens_q")(
        "Sinks are ignored where cum_seq_lens_q is given."
    )
    first_sink_switches_all = wrong(
        sinks=lambda sinks, *_: None if sinks is not None and float(sinks[0]) == -torch.inf else sinks
    )("A first head without a sink, minus infinity, is taken for a layer without sinks.")

    @wrong(stage="finish_tile")
    def no_sink_no_keys_nan(self, problem, tile, rows):
        """A row that sees no key is NaN where its head's sink is minus infinity."""
        if problem.sinks is not None:
            rows.values[rows.lse_log2 == -torch.inf] = torch.nan


@wrong(mla=True)
class MergedAsMean(SplitKV):
    """The rows of a request's splits are averaged, whatever their sums of weights."""

    def shares(self, partials, origin):
        return torch.where(partials.total > 0, 1.0 / partials.total, 0.0)

    def sink_weight(self, problem, tile, sinks, origin):
        return torch.zeros_like(origin)


@wrong(mla=True, source="FlashInfer #4161")
class NondeterministicMerge(SplitKV):
    """Every other launch rounds the sums of several splits to bfloat16 before it merges them."""

    launches = 0

    def changed(self, problem):
        self.launches += 1
        return problem

    def summed(self, partials, shares):
        if self.launches % 2 == 0:
            partials = partials._replace(sums=partials.sums.bfloat16().float())
        return super().summed(partials, shares)
