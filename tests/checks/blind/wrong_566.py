"""Wrong: the request of a row is searched in cum_seq_lens_q by a bisection of 9 steps, too few for more than 512 requests."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


STEPS = 9


class Wrong(Kernel):
    def solve(self, run):
        if run.p.cu_seqlens_q is None or run.p.batch_size <= 2**STEPS:
            return super().solve(run)
        self.start(run)
        end = run.offsets[-1]
        run.out[end:] = 0
        if run.lse is not None:
            run.lse[end:] = -math.inf
        for row in range(end):
            low, high = 0, run.batch
            for _ in range(STEPS):
                middle = (low + high) // 2
                if run.offsets[middle] <= row:
                    low = middle
                else:
                    high = middle
            self.rows(run, low, row, row + 1)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
