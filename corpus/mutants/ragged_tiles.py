"""Mutants of the ragged context call that read its last tile of keys whole, tokens after the last offset with it."""

import torch

from corpus.models.ragged import Ragged
from corpus.wrong import wrong
from lab.calls.ragged_context import RaggedAttention

TILE = 64


def rows_and_tail(problem: RaggedAttention) -> tuple[slice, slice]:
    """Return the rows of the last request, and the tokens after it that its last tile has."""
    rows, keys = problem.cu_seqlens_q.tolist()[-2:], problem.cu_seqlens_kv.tolist()[-2:]
    return slice(*rows), slice(keys[1], keys[1] + (keys[0] - keys[1]) % TILE)


class RaggedTiles(Ragged):
    """Kernels of the ragged context call that read its last tile of keys whole, tokens after the last offset with it."""

    @wrong(stage="finish")
    def ragged_tokens_after_last_weighed(self, problem, out, lse_log2):
        """Values after the last offset, up to a tile of 64 keys, are multiplied by weights of zero: a NaN stays."""
        rows, tail = rows_and_tail(problem)
        out[rows] += (problem.value[tail].to(torch.float32) * 0.0).sum().to(out.dtype)

    @wrong(stage="finish")
    def ragged_logits_after_last_lowered(self, problem, out, lse_log2):
        """Logits of keys after the last offset, up to a tile of 64, are lowered by infinity: a NaN stays."""
        rows, tail = rows_and_tail(problem)
        stays = (problem.key[tail].to(torch.float32) * 0.0).sum()
        for result in (out, lse_log2):
            if result is not None:
                result[rows] += stays.to(result.dtype)
