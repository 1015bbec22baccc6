"""Wrong: parts of 512 keys give natural logarithms, which the merge takes for base 2, so that a part of smaller LSE
weighs too much.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        part = super().partial
        if len(keys) <= 512:
            return part(run, r, query, keys, values, seen, first_key)
        outs, lses = [], []
        for start in range(0, len(keys), 512):
            c = slice(start, start + 512)
            acc, largest, total = part(run, r, query, keys[c], values[c], seen[:, c], first_key + start)
            outs.append(acc / torch.where(total > 0, total, 1.0).unsqueeze(2))
            lses.append(torch.where(total > 0, largest + torch.log(total), -math.inf))
        largest = torch.stack(lses).amax(0)
        origin = torch.where(largest.isfinite(), largest, 0.0)
        factors = [torch.exp2(lse - origin) for lse in lses]
        return sum(out * f.unsqueeze(2) for out, f in zip(outs, factors)), largest, sum(factors)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
