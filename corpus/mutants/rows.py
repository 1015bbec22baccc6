"""Mutants of rows through cum_seq_lens_q: none of a request, padding, bounds that no request reaches, few beside many."""

import itertools
from collections.abc import Sequence

import torch

from corpus.models.split_kv import Conditional
from corpus.wrong import CONTEXT, wrong


def largest_step(offsets: Sequence[int]) -> int:
    """Return the most rows that a request has."""
    return max(after - before for before, after in itertools.pairwise(offsets))


class BesidePrompt(Conditional):
    """Loses the rows of requests of `lost` rows, where another request of the batch has more than 128 for a K/V head."""

    def lost(self, group):
        """Return the rows of a request, of which each has `group` query heads for a K/V head, that are left zero."""
        return 0

    def finish(self, problem, out, lse):
        offsets, group = self.row_offsets(problem), problem.num_qo_heads // problem.num_kv_heads
        if largest_step(offsets) * group <= 128:
            return
        for begin, end in itertools.pairwise(offsets):
            if end - begin == self.lost(group):
                out[begin:end] = 0.0


class RaggedRows(Conditional):
    """Rows through cum_seq_lens_q: none of a request, padding, bounds that no request reaches."""

    @wrong(stage="table_row", mla=True)
    def first_without_rows_shifts(self, problem, tile):
        """Where the first request has no rows, each request reads the page table's row of the one before it."""
        return tile.request - (self.row_offsets(problem)[1] == 0)

    @wrong(stage="finish", mla=True)
    def last_without_rows_takes_one(self, problem, out, lse):
        """Where the last request has no rows, the last row of the one before it is left zero."""
        offsets = self.row_offsets(problem)
        if offsets[-2] == offsets[-1]:
            out[offsets[-1] - 1] = 0.0

    @wrong(stage="table_row", mla=True)
    def search_passes_one_without_rows(self, problem, tile):
        """The search for a row's request passes one without rows, not two: it ends at the second of them."""
        offsets, request = self.row_offsets(problem), tile.request
        return request - 1 if request > 1 and offsets[request - 2] == offsets[request] else request

    @wrong(stage="row_offsets", mla=True)
    def padding_given_to_last(self, problem):
        """The last request has all rows to the query's end, padding rows too, so that its own sit earlier."""
        return [*super().row_offsets(problem)[:-1], problem.num_rows]

    @wrong(stage="query_rows", mla=True)
    def bound_taken_as_stride(self, problem, tile):
        """Requests are taken to have max_q_len rows each where max_q_len is larger than any has."""
        offsets = self.row_offsets(problem)
        if problem.max_q_len <= largest_step(offsets):
            return super().query_rows(problem, tile)
        start = tile.first_row - offsets[tile.request] + tile.request * problem.max_q_len
        rows = (torch.arange(tile.num_rows, device=problem.query.device) + start) % problem.num_rows
        return problem.query.to(torch.float32)[rows].transpose(0, 1)

    @wrong(stage="finish", mla=True)
    def lse_lost_among_requests_without_rows(self, problem, out, lse):
        """Where a request has no rows, the LSE of the first row is that of the last."""
        offsets = self.row_offsets(problem)
        if lse is not None and len(set(offsets)) < len(offsets):
            lse[0] = lse[offsets[-1] - 1].clone()


class FewBesideMany(BesidePrompt):
    """Few rows beside a prompt are lost."""

    filled_tile_beside_prompt_lost = wrong(CONTEXT, lost=lambda _, group: 64 // group)(
        "Beside a prompt, requests whose rows just fill a tile of 64 are taken neither for decodes nor for prompts."
    )
    one_more_than_tile_beside_prompt_lost = wrong(CONTEXT, lost=lambda _, group: 16 // group + 1)(
        "Beside a prompt, requests of one row more than a tile of 16 holds are taken neither for decodes nor for prompts."
    )
