"""The maxima of splits of 512 keys go through the workspace as bf16, while their sums are relative to the float32 ones."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        if len(keys) <= 512:
            return super().partial(run, r, query, keys, values, seen, first_key)
        parts = []
        for i in range(0, len(keys), 512):
            own = slice(i, i + 512)
            acc, largest, total = super().partial(run, r, query, keys[own], values[own], seen[:, own], first_key + i)
            parts.append((acc, largest.to(torch.bfloat16).to(largest.dtype), total))
        return self.merge(parts)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
