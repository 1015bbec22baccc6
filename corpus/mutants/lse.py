"""Mutants whose output is right and whose LSE is not."""

import math

import torch
from torch import Tensor

from corpus.mutants.mutant import DECODE
from corpus.mutants.split_kv import Partials, Rows, RowTile, SplitKV
from lab.calls.problem import PagedAttention


class LseBaseE(SplitKV, mla=True, source="FlashInfer #2113", lse_log2=lambda lse_log2, *_: lse_log2 * math.log(2.0)):
    """The LSE is a natural logarithm."""


class LseGarbageEmpty(SplitKV, mla=True, source="FlashInfer #3047"):
    """The LSE of a row that sees no key is finite."""

    def lse_log2(self, origin: Tensor, total: Tensor) -> Tensor:
        return torch.where(total == 0, 0.0, super().lse_log2(origin, total))


class LseWithoutSink(SplitKV, mla=True):
    """The LSE leaves the sink out."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> Rows:
        values, _ = super().merged(problem, tile, partials)
        return Rows(values, torch.logsumexp(partials.largest + partials.total.log(), dim=-1).T / math.log(2.0))


class LseTransposed(SplitKV, mla=True, source="vLLM #28840"):
    """The LSE's memory holds [num_qo_heads, num_rows]."""

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        if lse is not None:
            lse.copy_(lse.T.flatten().clone().view(lse.shape))


class LseOfLargest(
    SplitKV, mla=True, lse_log2=lambda _, origin, total: torch.where(total == 0, -torch.inf, origin / math.log(2.0))
):
    """The LSE is the largest logit."""


class LseOfLastSplit(SplitKV, mla=True):
    """The LSE counts the keys of the last split alone."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> Rows:
        values, _ = super().merged(problem, tile, partials)
        return Rows(values, super().merged(problem, tile, Partials(*(part[:, :, -1:] for part in partials)))[1])


class LseWithBmm2(SplitKV, mla=True):
    """The LSE counts weights that bmm2_scale has multiplied."""

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        rows.lse_log2[:] += math.log2(abs(float(problem.bmm2_scale)))


class LseBufferIgnored(SplitKV, mla=True):
    """The LSE goes to a new tensor, whatever buffer the caller gave."""

    def results(self, problem: PagedAttention) -> tuple[Tensor, Tensor | None]:
        out, lse = super().results(problem)
        return out, None if lse is None else torch.empty_like(lse)


class LseOfManySplits(SplitKV, mla=True):
    """The LSE of a row with more than 64 splits lacks the first."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> Rows:
        values, lse_log2 = super().merged(problem, tile, partials)
        if tile.num_splits > 64:
            fewer = partials._replace(total=partials.total.clone())
            fewer.total[..., 0] = 0.0
            lse_log2 = super().merged(problem, tile, fewer)[1]
        return Rows(values, lse_log2)


class LseOfRaggedRows(SplitKV, interface=(DECODE,)):
    """The LSE of rows through cum_seq_lens_q is a natural logarithm."""

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        rows.lse_log2[:] *= 1.0 if problem.cu_seqlens_q is None else math.log(2.0)
