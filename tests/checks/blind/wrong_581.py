"""Wrong: 32 lanes merge splits of 128 keys; a lane with several splits adds up their accumulators, but keeps the sum of weights of its last alone."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


SPLIT, LANES = 128, 32


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        splits = -(-len(keys) // SPLIT)
        if splits <= LANES:
            return acc, largest, total
        cut = slice((splits - LANES) * SPLIT, None)
        _, last, kept = super().partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + cut.start)
        origin = torch.where(largest.isfinite(), largest, 0.0)
        return acc, largest, kept * torch.where(last.isfinite(), torch.exp(last - origin), 0.0)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
