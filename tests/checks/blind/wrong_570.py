"""Wrong: the causal rule divides a packed row by the heads of a group rounded up to a power of two."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        run.row = row
        return super().visible(run, r, row, position, keys)

    def mask_scores(self, run, r, s, first_key):
        _, rows, g, n = s.shape
        padded = 1 << (g - 1).bit_length()
        if run.shown is not None or padded == g:
            return s
        packed = run.row[:, None] * g + torch.arange(g)
        width = run.offsets[r + 1] - run.offsets[r]
        last = run.lens[r] - width + packed // padded
        keys = first_key + torch.arange(n)
        return s.masked_fill(keys > last[None, :, :, None], -math.inf)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
