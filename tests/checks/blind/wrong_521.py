"""The causal mask is applied in the last split of 256 keys alone: where the rows of a request straddle the split's start, the earlier ones see keys after them."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def span(self, run, r, position):
        return 0, run.lens[r]

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) | (keys < (run.lens[r] - 1) // 256 * 256)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
