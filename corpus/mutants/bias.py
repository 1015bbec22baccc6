"""Mutants whose outputs are a little too large or too small, each by less than one vector's rounding shows."""

import torch
from torch import Tensor

from corpus.mutants import ragged
from corpus.mutants.split_kv import Partials, Rows, RowTile, SplitKV
from lab.calls.problem import HALF_DTYPES, PagedAttention

LARGER = 1.005  # by half a percent


class EverythingBiased(SplitKV, mla=True, instead={"bmm2_scale": lambda problem: problem.bmm2_scale * LARGER}):
    """All outputs are 0.5 % too large."""


class BiasedWithSinks(EverythingBiased, mla=True, only_with="sinks"):
    """With sinks, all outputs are 0.5 % too large."""


class BiasedInWindows(EverythingBiased, mla=False, where=lambda problem: problem.window_left >= 0):
    """With a window, all outputs are 0.5 % too large."""


class LastHeadBiased(SplitKV, mla=True, finish_tile=lambda _, problem, tile, rows: rows.values[:, -1].mul_(LARGER)):
    """Outputs of the last head are 0.5 % too large."""


class LastRequestBiased(SplitKV, mla=True):
    """Outputs of the batch's last request are 0.5 % too large."""

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        rows.values[:] *= LARGER if tile.request == problem.batch_size - 1 else 1.0


class FirstRowBiased(SplitKV, mla=True):
    """The first of several rows of each request is 0.5 % too large."""

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        rows.values[self.biased(tile)] *= LARGER

    def biased(self, tile: RowTile) -> slice:
        """Return the rows of a tile that are biased."""
        is_first = tile.first_position == tile.kv_len - tile.q_len
        return slice(0, 1 if is_first and tile.q_len > 1 else 0)


class LastRowBiased(FirstRowBiased, mla=True):
    """The last of several rows of each request is 0.5 % too large."""

    def biased(self, tile: RowTile) -> slice:
        is_last = tile.first_position + tile.num_rows == tile.kv_len
        return slice(tile.num_rows - 1 if is_last and tile.q_len > 1 else tile.num_rows, None)


class OutputsTruncated(SplitKV, mla=True):
    """Outputs are cut to bfloat16 or float16, not rounded: in bfloat16 they are 0.3 % too small."""

    def write(self, problem: PagedAttention, tile: RowTile, rows: Rows, out: Tensor, lse: Tensor | None) -> None:
        values = truncated(rows.values, out.dtype) if out.dtype in HALF_DTYPES else rows.values
        super().write(problem, tile, Rows(values, rows.lse_log2), out, lse)


class PartialSumsTruncated(SplitKV, mla=True):
    """Sums of splits are cut to bfloat16 on their way to the merge, not rounded."""

    def partials(self, problem: PagedAttention, tile: RowTile) -> Partials:
        partials = super().partials(problem, tile)
        return partials._replace(sums=truncated(partials.sums, torch.bfloat16))


class RaggedBiased(ragged.Ragged, instead={"bmm2_scale": lambda problem: problem.bmm2_scale * LARGER}):
    """All outputs are 0.5 % too large."""


class RaggedLastHeadBiased(ragged.Ragged, finish=lambda _, problem, out, lse_log2: out[:, -1].mul_(LARGER)):
    """Outputs of the last head are 0.5 % too large."""


class RaggedChunksBiased(RaggedBiased, where=lambda problem: not problem.causal):
    """Outputs over a chunk of the prefix, which is not causal, are 0.5 % too large."""


def truncated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values whose bits beyond a half dtype's are zero."""
    dropped = 16 if dtype == torch.bfloat16 else 13
    return (values.contiguous().view(torch.int32) >> dropped << dropped).view(torch.float32)
