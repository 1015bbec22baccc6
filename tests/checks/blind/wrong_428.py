"""The causal mask is applied in the last K/V tile of 256 alone: where a request's rows straddle its start, the earlier rows see too much."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        last_tile = max(run.lens[r] - 1, 0) // 256 * 256
        return super().visible(run, r, row, position, keys) | (keys < last_tile).unsqueeze(0)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
