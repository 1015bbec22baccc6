"""Wrong: an online softmax over tiles of 64 keys that rescales the first 128 elements of its sums alone when a larger
logit comes.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        rows, heads = query.shape[:2]
        acc = query.new_zeros(rows, heads, values.shape[2])
        largest = query.new_full((rows, heads), -math.inf)
        total = query.new_zeros(rows, heads)
        for start in range(0, len(keys), 64):
            c = slice(start, start + 64)
            a, m, l = super().partial(run, r, query, keys[c], values[c], seen[:, c], first_key + start)
            new = torch.maximum(largest, m)
            origin = torch.where(new.isfinite(), new, 0.0)
            old, own = torch.exp(largest - origin), torch.where(m.isfinite(), torch.exp(m - origin), 0.0)
            acc[..., :128] *= old.unsqueeze(2)
            acc += a * own.unsqueeze(2)
            total = total * old + l * own
            largest = new
        return acc, largest, total


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
