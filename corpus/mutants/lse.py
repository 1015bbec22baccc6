"""Mutants whose output is right and whose LSE is not."""

import math

import torch

from corpus.models.split_kv import Partials, Rows, SplitKV
from corpus.wrong import DECODE, wrong


class LSE(SplitKV):
    """Kernels whose output is right and whose LSE is not."""

    lse_base_e = wrong(mla=True, source="FlashInfer #2113", lse_log2=lambda lse_log2, *_: lse_log2 * math.log(2.0))(
        "The LSE is a natural logarithm."
    )

    @wrong(stage="lse_log2", mla=True, source="FlashInfer #3047")
    def lse_garbage_empty(self, origin, total):
        """The LSE of a row that sees no key is finite."""
        return torch.where(total == 0, 0.0, super().lse_log2(origin, total))

    @wrong(stage="merged", mla=True)
    def lse_without_sink(self, problem, tile, partials):
        """The LSE leaves the sink out."""
        values, _ = super().merged(problem, tile, partials)
        return Rows(values, torch.logsumexp(partials.largest + partials.total.log(), dim=-1).T / math.log(2.0))

    @wrong(stage="finish", mla=True, source="vLLM #28840")
    def lse_transposed(self, problem, out, lse):
        """The LSE's memory holds [num_qo_heads, num_rows]."""
        if lse is not None:
            lse.copy_(lse.T.flatten().clone().view(lse.shape))

    lse_of_largest = wrong(
        mla=True, lse_log2=lambda _, origin, total: torch.where(total == 0, -torch.inf, origin / math.log(2.0))
    )("The LSE is the largest logit.")

    @wrong(stage="merged", mla=True)
    def lse_of_last_split(self, problem, tile, partials):
        """The LSE counts the keys of the last split alone."""
        values, _ = super().merged(problem, tile, partials)
        return Rows(values, super().merged(problem, tile, Partials(*(part[:, :, -1:] for part in partials)))[1])

    @wrong(stage="finish_tile", mla=True)
    def lse_with_bmm2(self, problem, tile, rows):
        """The LSE counts weights that bmm2_scale has multiplied."""
        rows.lse_log2[:] += math.log2(abs(float(problem.bmm2_scale)))

    @wrong(stage="results", mla=True)
    def lse_buffer_ignored(self, problem):
        """The LSE goes to a new tensor, whatever buffer the caller gave."""
        out, lse = super().results(problem)
        return out, None if lse is None else torch.empty_like(lse)

    @wrong(stage="merged", mla=True)
    def lse_of_many_splits(self, problem, tile, partials):
        """The LSE of a row with more than 64 splits lacks the first."""
        values, lse_log2 = super().merged(problem, tile, partials)
        if tile.num_splits > 64:
            fewer = partials._replace(total=partials.total.clone())
            fewer.total[..., 0] = 0.0
            lse_log2 = super().merged(problem, tile, fewer)[1]
        return Rows(values, lse_log2)

    @wrong(DECODE, stage="finish_tile")
    def lse_of_ragged_rows(self, problem, tile, rows):
        """The LSE of rows through cum_seq_lens_q is a natural logarithm."""
        rows.lse_log2[:] *= 1.0 if problem.cu_seqlens_q is None else math.log(2.0)
