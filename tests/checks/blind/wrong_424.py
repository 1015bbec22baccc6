"""causal=False lifts the mask, but a tile of 128 rows still walks K/V tiles of 128 only up to its last row's position."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.causal:
            return seen
        rows = run.offsets[r + 1] - run.offsets[r]
        last = torch.clamp((row // 128 + 1) * 128, max=rows) - 1
        end = (run.lens[r] - rows + last + 1 + 127) // 128 * 128
        return seen & (keys < end.unsqueeze(1))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
