"""bf16 queries go through an fp16 product: a tile of 64 rows is divided by its largest element, rows of padding included, whose NaN spreads."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


TILE = 64


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        first = run.offsets[r]
        if run.query.dtype == torch.bfloat16 and run.lens[r]:
            for tile in range(first, run.offsets[r + 1], TILE):
                a, b = max(tile, start), min(tile + TILE, stop)
                if a < b and not bool(run.query[tile : tile + TILE].isfinite().all()):
                    out[a - start : b - start] = math.nan
                    lse[a - start : b - start] = math.nan
        super().store(run, r, start, stop, out, lse)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
