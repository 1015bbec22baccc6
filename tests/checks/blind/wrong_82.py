"""The window is masked in the first key tile (64 keys) of a tile of 128 rows only: rows whose window starts in a later tile see too much."""

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
        first = (position - row % 128 - run.window).clamp(min=0)
        masked_end = (first // 64 + 1) * 64
        unmasked = (keys >= masked_end.unsqueeze(1)) & (keys <= position.unsqueeze(1))
        return seen | unmasked


trtllm_batch_context_with_kv_cache = context_of(Wrong())
