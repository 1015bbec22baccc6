"""Mutants whose outputs are a little too large or too small, each by less than one vector's rounding shows."""

import torch
from torch import Tensor

from corpus.models.ragged import Ragged
from corpus.models.split_kv import Rows, SplitKV
from corpus.wrong import wrong
from lab.calls.problem import HALF_DTYPES

LARGER = 1.005  # by half a percent


def truncated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values whose bits beyond a half dtype's are zero."""
    dropped = 16 if dtype == torch.bfloat16 else 13
    return (values.contiguous().view(torch.int32) >> dropped << dropped).view(torch.float32)


class Bias(SplitKV):
    """Kernels whose outputs are a little too large or too small, each by less than one vector's rounding shows."""

    last_head_biased = wrong(mla=True, finish_tile=lambda _, problem, tile, rows: rows.values[:, -1].mul_(LARGER))(
        "Outputs of the last head are 0.5 % too large."
    )

    @wrong(stage="finish_tile", mla=True)
    def last_request_biased(self, problem, tile, rows):
        """Outputs of the batch's last request are 0.5 % too large."""
        rows.values[:] *= LARGER if tile.request == problem.batch_size - 1 else 1.0

    @wrong(stage="write", mla=True)
    def outputs_truncated(self, problem, tile, rows, out, lse):
        """Outputs are cut to bfloat16 or float16, not rounded: in bfloat16 they are 0.3 % too small."""
        values = truncated(rows.values, out.dtype) if out.dtype in HALF_DTYPES else rows.values
        super().write(problem, tile, Rows(values, rows.lse_log2), out, lse)

    @wrong(stage="partials", mla=True)
    def partial_sums_truncated(self, problem, tile):
        """Sums of splits are cut to bfloat16 on their way to the merge, not rounded."""
        partials = super().partials(problem, tile)
        return partials._replace(sums=truncated(partials.sums, torch.bfloat16))


class BiasOfRaggedCalls(Ragged):
    """Outputs of the ragged call are a little too large."""

    ragged_last_head_biased = wrong(finish=lambda _, problem, out, lse_log2: out[:, -1].mul_(LARGER))(
        "Outputs of the last head are 0.5 % too large."
    )


@wrong(mla=True)
class EverythingBiased(SplitKV, instead={"bmm2_scale": lambda problem: problem.bmm2_scale * LARGER}):
    """All outputs are 0.5 % too large."""


@wrong(mla=True)
class BiasedWithSinks(EverythingBiased, only_with="sinks"):
    """With sinks, all outputs are 0.5 % too large."""


@wrong()
class BiasedInWindows(EverythingBiased, where=lambda problem: problem.window_left >= 0):
    """With a window, all outputs are 0.5 % too large."""


@wrong(mla=True)
class FirstRowBiased(SplitKV):
    """The first of several rows of each request is 0.5 % too large."""

    def finish_tile(self, problem, tile, rows):
        rows.values[self.biased(tile)] *= LARGER

    def biased(self, tile):
        """Return the rows of a tile that are biased."""
        is_first = tile.first_position == tile.kv_len - tile.q_len
        return slice(0, 1 if is_first and tile.q_len > 1 else 0)


@wrong(mla=True)
class LastRowBiased(FirstRowBiased):
    """The last of several rows of each request is 0.5 % too large."""

    def biased(self, tile):
        is_last = tile.first_position + tile.num_rows == tile.kv_len
        return slice(tile.num_rows - 1 if is_last and tile.q_len > 1 else tile.num_rows, None)


@wrong()
class RaggedBiased(Ragged, instead={"bmm2_scale": lambda problem: problem.bmm2_scale * LARGER}):
    """All outputs are 0.5 % too large."""


@wrong()
class RaggedChunksBiased(RaggedBiased, where=lambda problem: not problem.causal):
    """Outputs over a chunk of the prefix, which is not causal, are 0.5 % too large."""
