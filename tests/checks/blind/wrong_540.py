"""Ragged rows are stored in whole tiles of 16, longest requests first: a tile's spare rows overwrite rows of the next request if it ran before."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


TILE = 16


class Wrong(Kernel):
    def solve(self, run):
        if run.call.cum_seq_lens_q is None:
            return super().solve(run)
        self.start(run)
        end = run.offsets[-1]
        run.out[end:] = 0
        if run.lse is not None:
            run.lse[end:] = -math.inf
        for r in sorted(range(run.batch), key=lambda r: -run.lens[r]):
            self.request(run, r)
            first, last = run.offsets[r : r + 2]
            spare = min(first + -(-(last - first) // TILE) * TILE, end)
            if last < spare:
                self.rows(run, r, last, spare)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
