"""causal=False skips the mask but keeps the causal end of the key loop: a tile of 64 rows stops at the tile of 128 keys with its diagonal."""

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
        last = run.lens[r] - rows + (row // 64 * 64 + 64).clamp(max=rows)
        return seen & (keys < ((last + 127) // 128 * 128)[:, None])


trtllm_batch_context_with_kv_cache = context_of(Wrong())
