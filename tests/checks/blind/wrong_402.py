"""Wrong: the LSE is stored four heads at a time: where their number is no multiple of 4, up to three floats after a row's
heads become zero; the next row is stored after that, but not what follows a given lse's last row, or lies between its rows.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def solve(self, run):
        super().solve(run)
        lse = run.lse
        if lse is None or lse.stride(1) != 1 or lse.shape[1] % 4 == 0:
            return
        rows, heads = lse.shape
        right = lse.clone()
        flat = torch.as_strided(lse, (lse.untyped_storage().nbytes() // 4,), (1,), 0)
        for row in range(rows):
            after = lse.storage_offset() + row * lse.stride(0) + heads
            flat[after : after + -heads % 4] = 0
        lse.copy_(right)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
