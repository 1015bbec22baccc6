"""Rows of a request share K/V tiles of 64: the window's left edge is masked in the first tile alone, rows whose window begins later see too much."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        window, seen = run.window, super().visible(run, r, row, position, keys)
        if window < 0:
            return seen
        run.window = -1
        seen = super().visible(run, r, row, position, keys)
        run.window = window
        first = max(0, run.lens[r] - (run.offsets[r + 1] - run.offsets[r]) - window)
        return seen & ((keys >= position.unsqueeze(1) - window) | (keys >= first // 64 * 64 + 64))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
