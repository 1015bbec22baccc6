"""With cum_seq_lens_q, rows are packed with their group in tiles of 64; from the second tile of a request on, a row's position forgets the tile's first row."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        if run.call.cum_seq_lens_q is not None:
            per_tile = max(1, 64 // run.group)
            position = position - row // per_tile * per_tile
        return super().visible(run, r, row, position, keys)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
