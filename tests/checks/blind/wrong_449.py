"""Rows and heads of a group are packed densely in tiles of 64, but a tile's first row is reckoned as tile * (64 // group)."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


TILE = 64


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        run.position = position
        return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)

    def mask_scores(self, run, r, s, first_key):
        width = run.offsets[r + 1] - run.offsets[r]
        if width * run.group <= TILE or run.shown is not None:
            return s
        first = run.lens[r] - width
        packed = (run.position - first).unsqueeze(1) * run.group + torch.arange(run.group)
        row = packed // TILE * (TILE // run.group) + packed % TILE // run.group
        keys = first_key + torch.arange(s.shape[3])
        return s.masked_fill(keys > (first + row).unsqueeze(2), -math.inf)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
