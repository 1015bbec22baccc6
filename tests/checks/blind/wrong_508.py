"""Rows times group are packed in tiles of 64: from the second tile on a row's causal position counts from the tile's first row."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def positions(self, run, r, row):
        return super().positions(run, r, row) - row * run.group // 64 * 64 // run.group


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
