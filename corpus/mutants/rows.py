"""Mutants of rows through cum_seq_lens_q: none of a request, padding, bounds that no request reaches, few beside many."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from corpus.mutants.conditional import Conditional
from corpus.mutants.mutant import CONTEXT
from corpus.mutants.split_kv import RowTile
from lab.calls.problem import PagedAttention


class FirstWithoutRowsShifts(Conditional, mla=True):
    """Where the first request has no rows, each request reads the page table's row of the one before it."""

    def table_row(self, problem: PagedAttention, tile: RowTile) -> int:
        return tile.request - (self.row_offsets(problem)[1] == 0)


class LastWithoutRowsTakesOne(Conditional, mla=True):
    """Where the last request has no rows, the last row of the one before it is left zero."""

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        offsets = self.row_offsets(problem)
        if offsets[-2] == offsets[-1]:
            out[offsets[-1] - 1] = 0.0


class SearchPassesOneWithoutRows(Conditional, mla=True):
    """The search for a row's request passes one without rows, not two: it ends at the second of them."""

    def table_row(self, problem: PagedAttention, tile: RowTile) -> int:
        offsets, request = self.row_offsets(problem), tile.request
        return request - 1 if request > 1 and offsets[request - 2] == offsets[request] else request


class PaddingGivenToLast(Conditional, mla=True):
    """The last request has all rows to the query's end, padding rows too, so that its own sit earlier."""

    def row_offsets(self, problem: PagedAttention) -> list[int]:
        return [*super().row_offsets(problem)[:-1], problem.num_rows]


class BoundTakenAsStride(Conditional, mla=True):
    """Requests are taken to have max_q_len rows each where max_q_len is larger than any has."""

    def query_rows(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        offsets = self.row_offsets(problem)
        if problem.max_q_len <= largest_step(offsets):
            return super().query_rows(problem, tile)
        start = tile.first_row - offsets[tile.request] + tile.request * problem.max_q_len
        rows = (torch.arange(tile.num_rows, device=problem.query.device) + start) % problem.num_rows
        return problem.query.to(torch.float32)[rows].transpose(0, 1)


class LseLostAmongRequestsWithoutRows(Conditional, mla=True):
    """Where a request has no rows, the LSE of the first row is that of the last."""

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        offsets = self.row_offsets(problem)
        if lse is not None and len(set(offsets)) < len(offsets):
            lse[0] = lse[offsets[-1] - 1].clone()


class BesidePrompt(Conditional, is_model=True, interface=(CONTEXT,)):
    """Loses the rows of requests of `lost` rows, where another request of the batch has more than 128 for a K/V head."""

    def lost(self, group: int) -> int:
        """Return the rows of a request, of which each has `group` query heads for a K/V head, that are left zero."""
        return 0

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        offsets, group = self.row_offsets(problem), problem.num_qo_heads // problem.num_kv_heads
        if largest_step(offsets) * group <= 128:
            return
        for begin, end in itertools.pairwise(offsets):
            if end - begin == self.lost(group):
                out[begin:end] = 0.0


class FilledTileBesidePromptLost(BesidePrompt, lost=lambda _, group: 64 // group):
    """Beside a prompt, requests whose rows just fill a tile of 64 are taken neither for decodes nor for prompts."""


class OneMoreThanTileBesidePromptLost(BesidePrompt, lost=lambda _, group: 16 // group + 1):
    """Beside a prompt, requests of one row more than a tile of 16 holds are taken neither for decodes nor for prompts."""


def largest_step(offsets: Sequence[int]) -> int:
    """Return the most rows that a request has."""
    return max(after - before for before, after in itertools.pairwise(offsets))
