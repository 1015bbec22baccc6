"""Causal: tiles of 128 rows are computed in pairs, i and n - 1 - i, to balance the work: an odd number leaves the middle one out."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def request(self, run, r):
        super().request(run, r)
        first, last = run.offsets[r : r + 2]
        tiles = -(-(last - first) // 128)
        if run.causal and tiles > 1 and tiles % 2:
            middle = slice(first + tiles // 2 * 128, first + tiles // 2 * 128 + 128)
            run.out[middle] = 0
            if run.lse is not None:
                run.lse[middle] = -math.inf


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
