"""Windows: the first K/V tile of 64 of a tile of 64 query rows is that of its last row's window: earlier rows lose keys."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.window < 0:
            return seen
        rows = run.offsets[r + 1] - run.offsets[r]
        last = torch.clamp((row // 64 + 1) * 64, max=rows) - 1
        start = (run.lens[r] - rows + last - run.window).clamp(min=0) // 64 * 64
        return seen & (keys >= start.unsqueeze(1))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
