"""Requests without keys are flagged in a bitmap of 128 bits: request r over 127 is skipped where request r % 128 has no keys."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.empty = [False] * 128
        for r, length in enumerate(run.lens):
            run.empty[r % 128] |= length == 0

    def store(self, run, r, start, stop, out, lse):
        if r >= 128 and run.empty[r % 128]:
            out, lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
        super().store(run, r, start, stop, out, lse)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
