"""The LSE is stored four heads at a time: with 6 heads, say, two floats after each row's are overwritten."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def solve(self, run):
        super().solve(run)
        lse = run.lse
        if lse is None or run.p.lse is None or lse.stride(1) != 1 or lse.shape[1] % 4 == 0:
            return
        rows, heads = run.offsets[-1], lse.shape[1]
        cells = torch.as_strided(lse, (lse.untyped_storage().nbytes() // 4,), (1,), 0)
        own = torch.zeros(len(cells), dtype=torch.bool)
        torch.as_strided(own, lse.shape, lse.stride(), lse.storage_offset())[:] = True
        first = lse.storage_offset() + torch.arange(rows) * lse.stride(0)
        beside = (first[:, None] + torch.arange(heads, -(-heads // 4) * 4)).flatten()
        beside = beside[beside < len(cells)]
        cells[beside[~own[beside]]] = 0.0


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
