"""Wrong: a block of 64 keys is taken to need no mask if the first row of a tile of 64 rows sees it whole, with a window too."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


TILE = 64


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.window >= 0:
            first = (position - row % TILE)[:, None]
            block = keys // TILE * TILE
            seen = seen | ((block + TILE - 1 <= first) & (block >= first - run.window))
        return seen


trtllm_batch_context_with_kv_cache = context_of(Wrong())
