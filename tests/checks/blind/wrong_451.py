"""The left edge of the window is looked at in the first tile of 64 keys of a tile of 128 rows alone."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


ROWS, KEYS = 128, 64


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        window, run.window = run.window, -1
        seen = super().visible(run, r, row, position, keys)
        run.window = window
        if window < 0:
            return seen
        first = run.lens[r] - (run.offsets[r + 1] - run.offsets[r]) + row // ROWS * ROWS
        start = (first - window).clamp(min=0)
        inside = keys >= (position - window).unsqueeze(1)
        masked = keys < (start // KEYS * KEYS + KEYS).unsqueeze(1)
        return seen & (keys >= start.unsqueeze(1)) & (inside | ~masked)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
