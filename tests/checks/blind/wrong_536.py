"""Rows and heads of a group are packed in tiles of 64; a packed row's token counts from the tile's first token, as if tiles began with a head 0."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


TILE = 64


class Wrong(Kernel):
    def rows(self, run, r, start, stop):
        run.row_of_chunk = torch.arange(start, stop) - run.offsets[r]
        super().rows(run, r, start, stop)

    def mask_scores(self, run, r, s, first_key):
        _, _, g, n = s.shape
        if run.shown is not None or not n:
            return s
        packed = run.row_of_chunk.unsqueeze(1) * g + torch.arange(g)
        token = packed // TILE * TILE // g + packed % TILE // g
        position = self.positions(run, r, token)
        keys = first_key + torch.arange(n)
        return s.masked_fill(keys > position.unsqueeze(2), -math.inf)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
