"""Wrong: K's tile is swizzled by the key's number in eight; from column 64 on the swizzle is undone by its number in
four, so that half of the keys have their 16-byte chunks in another order.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def load(self, run, r, a, b):
        keys, values = super().load(run, r, a, b)
        if run.k_cache.dtype.itemsize != 2:
            return keys, values
        keys = keys.clone()
        wrong = torch.arange(a, b) % 8 >= 4
        for first in range(64, keys.shape[2] - 63, 64):
            chunks = keys[wrong, :, first : first + 64].unflatten(2, (8, 8))
            keys[wrong, :, first : first + 64] = chunks[:, :, torch.arange(8) ^ 4].flatten(2)
        return keys, values


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
