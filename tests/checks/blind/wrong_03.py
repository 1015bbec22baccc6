"""A windowed row walks at most 64 tiles of 64 keys: of a wider window it sees the newest 4,096 keys."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.window >= 0:
            seen = seen & (keys > position.unsqueeze(1) - 64 * 64)
        return seen


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
