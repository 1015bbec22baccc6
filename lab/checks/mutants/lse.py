"""Mutants whose output is right and whose LSE is not."""

import math

import torch
from torch import Tensor

from lab.calls.problem import PagedAttention
from lab.checks.mutants.mutant import DECODE, mutants_of
from lab.checks.mutants.split_kv import Partials, RowTile, SplitKV


class LseBaseE(SplitKV):
    """The LSE is a natural logarithm."""

    source = "FlashInfer #2113"

    def lse_log2(self, origin: Tensor, total: Tensor) -> Tensor:
        return super().lse_log2(origin, total) * math.log(2.0)


class LseGarbageEmpty(SplitKV):
    """The LSE of a row that sees no key is finite."""

    source = "FlashInfer #3047"

    def lse_log2(self, origin: Tensor, total: Tensor) -> Tensor:
        return torch.where(total == 0, 0.0, super().lse_log2(origin, total))


class LseWithoutSink(SplitKV):
    """The LSE leaves the sink out."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> tuple[Tensor, Tensor]:
        values, _ = super().merged(problem, tile, partials)
        return values, torch.logsumexp(partials.largest + partials.total.log(), dim=-1).T / math.log(2.0)


class LseTransposed(SplitKV):
    """The LSE's memory holds [num_qo_heads, num_rows]."""

    source = "vLLM #28840"

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> object:
        if lse is not None:
            lse.copy_(lse.T.flatten().clone().view(lse.shape))
        return super().returned(problem, out, lse)


class LseOfLargest(SplitKV):
    """The LSE is the largest logit."""

    def lse_log2(self, origin: Tensor, total: Tensor) -> Tensor:
        return torch.where(total == 0, -torch.inf, origin / math.log(2.0))


class LseOfLastSplit(SplitKV):
    """The LSE counts the keys of the last split alone."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> tuple[Tensor, Tensor]:
        values, _ = super().merged(problem, tile, partials)
        return values, super().merged(problem, tile, Partials(*(part[:, :, -1:] for part in partials)))[1]


class LseWithBmm2(SplitKV):
    """The LSE counts weights that bmm2_scale has multiplied."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> tuple[Tensor, Tensor]:
        values, lse_log2 = super().merged(problem, tile, partials)
        return values, lse_log2 + math.log2(abs(float(problem.bmm2_scale)))


class LseBufferIgnored(SplitKV):
    """The LSE goes to a new tensor, whatever buffer the caller gave."""

    def results(self, problem: PagedAttention) -> tuple[Tensor, Tensor | None]:
        out, lse = super().results(problem)
        return out, None if lse is None else torch.empty_like(lse)


class LseOfManySplits(SplitKV):
    """The LSE of a row with more than 64 splits lacks the first."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> tuple[Tensor, Tensor]:
        values, lse_log2 = super().merged(problem, tile, partials)
        if tile.num_splits > 64:
            fewer = partials._replace(total=partials.total.clone())
            fewer.total[..., 0] = 0.0
            lse_log2 = super().merged(problem, tile, fewer)[1]
        return values, lse_log2


class LseOfRaggedRows(SplitKV):
    """The LSE of rows through cum_seq_lens_q is a natural logarithm."""

    interface = (DECODE,)

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> tuple[Tensor, Tensor]:
        values, lse_log2 = super().merged(problem, tile, partials)
        return values, lse_log2 if problem.cu_seqlens_q is None else lse_log2 * math.log(2.0)


MUTANTS = mutants_of(__name__)
