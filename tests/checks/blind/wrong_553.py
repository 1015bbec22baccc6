"""A tile of 64 rows wholly before a request's first key leaves early with zeros, and with an LSE of 0."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


TILE = 64


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        if run.causal and run.lens[r] > 0:
            row = torch.arange(start, stop) - run.offsets[r]
            q_len = run.offsets[r + 1] - run.offsets[r]
            last = ((row // TILE + 1) * TILE).clamp(max=q_len) - 1
            early = run.lens[r] - q_len + last < 0
            lse = torch.where(early.unsqueeze(1), 0.0, lse)
        super().store(run, r, start, stop, out, lse)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
