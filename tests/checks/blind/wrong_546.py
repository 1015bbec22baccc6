"""A row's request is found by a binary search of 9 steps: of more than 512 requests some rows find the one before theirs, and are not computed."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


STEPS = 9


class Wrong(Kernel):
    def solve(self, run):
        super().solve(run)
        for row in range(run.offsets[-1]):
            low, high = 0, run.batch
            for _ in range(STEPS):
                if high - low > 1:
                    middle = (low + high) // 2
                    low, high = (middle, high) if run.offsets[middle] <= row else (low, middle)
            if row >= run.offsets[low + 1]:
                run.out[row] = 0
                if run.lse is not None:
                    run.lse[row] = -math.inf


trtllm_batch_context_with_kv_cache = context_of(Wrong())
