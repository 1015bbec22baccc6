"""The row tiles are summed over 32 requests at a time, and the next 32 start from the sum without the 32nd: as many tiles of theirs are never made."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


TILE, LANES = 64, 32


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        tiles = [(r, i) for r in range(run.batch) for i in range(-(-(run.offsets[r + 1] - run.offsets[r]) // TILE))]
        run.lost = set()
        for last in range(LANES - 1, run.batch - 1, LANES):
            count = sum(r == last for r, _ in tiles)
            run.lost.update([tile for tile in tiles if tile[0] > last][:count])

    def store(self, run, r, start, stop, out, lse):
        first = run.offsets[r]
        for tile, i in run.lost:
            if tile == r:
                a, b = max(first + i * TILE, start), min(first + (i + 1) * TILE, stop)
                out[a - start : max(b, a) - start] = 0.0
                lse[a - start : max(b, a) - start] = 0.0
        super().store(run, r, start, stop, out, lse)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
