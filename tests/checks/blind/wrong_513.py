"""A window's left edge is masked only in the first tile of 64 keys of a tile of 64 rows: where the rows' edges reach into the next tile, that one is not masked."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        if not run.causal or run.window < 0:
            return super().visible(run, r, row, position, keys)
        first = (position - row % 64 - run.window).clamp(min=0)[:, None] // 64 * 64
        rows = position[:, None]
        return (keys <= rows) & (keys >= first) & ((keys >= rows - run.window) | (keys >= first + 64))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
