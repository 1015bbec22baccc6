"""Mutants that are right unless huge or NaN values lie where no row may read them, or in a buffer that the call must write."""

import math
from dataclasses import replace

import torch

from corpus.models.ragged import Ragged
from corpus.models.split_kv import Forgiving, gathered
from corpus.mutants.pages import with_strides
from corpus.wrong import wrong


@wrong()
class OriginOfWholePages(Forgiving):
    """The largest logit, from which exponents are counted, is that of whole pages, with the tokens before a window."""

    def key_range(self, problem, first_position, num_rows, kv_len):
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return start // problem.page_size * problem.page_size, end

    def masked(self, scores, visible):
        self.hidden = scores.masked_fill(visible, -math.inf)
        return super().masked(scores, visible)

    def in_splits(self, problem, tile, tensor, fill, dim):
        if fill == -math.inf:
            self.hidden = super().in_splits(problem, tile, self.hidden, fill, dim)
        return super().in_splits(problem, tile, tensor, fill, dim)

    def largest(self, scores):
        return torch.maximum(super().largest(scores), super().largest(self.hidden))


class AddedTo(Forgiving):
    @wrong(stage="changed")
    def v_inner_strides_from_k(self, problem):
        """V is read with its own page stride, and with the strides of K's heads and tokens."""
        strides, cache = problem.k_cache.stride()[1:3], problem.v_cache
        if strides == cache.stride()[1:3]:
            return problem
        return replace(problem, v_cache=with_strides((cache.stride(0), *strides), cache))

    @wrong(stage="write", mla=True)
    def lse_kept_if_larger(self, problem, tile, rows, out, lse):
        """The larger of the LSE and of what the caller's buffer holds is written, without NaN."""
        if problem.lse is not None:
            rows = rows._replace(lse_log2=torch.fmax(rows.lse_log2, lse[tile.rows].float()))
        super().write(problem, tile, rows, out, lse)

    @wrong(stage="keys", mla=True)
    def gap_times_zero(self, problem, tile, positions):
        """Keys that lie apart are read up to the next, and what lies between is multiplied by zero."""
        cache, keys = problem.k_cache, super().keys(problem, tile, positions)
        size = min(stride for stride, count in zip(cache.stride(), cache.shape[:3], strict=False) if count > 1)
        if size <= cache.shape[3] or not cache.is_floating_point():
            return keys
        whole = cache.as_strided((*cache.shape[:3], size), cache.stride())
        pages = self.pages(problem, problem.k_block_tables, tile, positions)
        gaps = gathered(whole, pages, self.offsets(problem, positions))[..., cache.shape[3] :]
        return keys + 0.0 * gaps.float().sum(dim=-1, keepdim=True).transpose(0, 1)


@wrong()
class RaggedOutputAddedTo(Ragged):
    """The output is added to what the caller's buffer holds, from which NaN is cleared."""

    def changed(self, problem):
        self.held = None if problem.out is None else problem.out.nan_to_num(0.0)
        return problem

    def finish(self, problem, out, lse_log2):
        if self.held is not None:
            out += self.held
