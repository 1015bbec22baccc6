"""The sink is added with K/V tile 0 of 64 keys, which a tile of 64 rows skips once its window begins after it."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def sink_rows(self, run, r, position):
        sinks = super().sink_rows(run, r, position)
        if sinks is None or run.window < 0:
            return sinks
        before = run.lens[r] - (run.offsets[r + 1] - run.offsets[r])
        first = (position - before) // 64 * 64 + before - run.window
        return torch.where((first >= 64).unsqueeze(1), -math.inf, sinks)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
