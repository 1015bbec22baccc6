"""With a draft mask, tiles of 64 keys wholly before the draft take the path without masking: of a window they honour whole tiles only."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


TILE = 64


class Wrong(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (start // TILE * TILE if run.shown is not None else start), end

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.shown is None or run.window < 0:
            return seen
        draft = run.lens[r] - run.shown.shape[1]
        before = (keys // TILE + 1) * TILE <= draft
        first = (position.min() - run.window).clamp(min=0) // TILE
        return torch.where(before, keys // TILE >= first, seen)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
