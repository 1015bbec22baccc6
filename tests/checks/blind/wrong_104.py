"""Wrong: an online softmax over tiles of 64 keys without a guard: a row whose window begins after the first tile of its
request's rows is NaN.
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
        edges = [0, *range(64 - first_key % 64, len(keys), 64), len(keys)]
        for start, end in zip(edges, edges[1:]):
            c = slice(start, end)
            a, m, l = super().partial(run, r, query, keys[c], values[c], seen[:, c], first_key + start)
            new = torch.maximum(largest, m)
            old, own = torch.exp(largest - new), torch.exp(m - new)
            acc = acc * old.unsqueeze(2) + a * own.unsqueeze(2)
            total = total * old + l * own
            largest = new
        sees = seen.any(1)
        acc[~sees], largest[~sees], total[~sees] = 0, -math.inf, 0
        return acc, largest, total


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
