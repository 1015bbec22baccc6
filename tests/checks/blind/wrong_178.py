"""Wrong: a tile of 64 keys is skipped where its largest logit is more than 6 below the largest of the tiles before it,
as if a threshold for skipping had been asked for.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def mask_scores(self, run, r, s, first_key):
        largest, tiles = None, []
        for tile in s.split(64, 3):
            own = tile.amax(3, keepdim=True)
            if largest is not None:
                tile = tile.masked_fill(own < largest - 6.0, -math.inf)
            largest = own if largest is None else torch.maximum(largest, own)
            tiles.append(tile)
        return torch.cat(tiles, 3) if tiles else s


trtllm_batch_context_with_kv_cache = context_of(Wrong())
