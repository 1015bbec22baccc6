"""The running maximum is that of Q.K^T before the scale: with a negative bmm1_scale it is the smallest logit, and exp overflows."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        if run.scale1 >= 0 or not len(keys):
            return super().partial(run, r, query, keys, values, seen, first_key)
        s = self.scores(run, r, query, keys, seen, first_key)
        rows, g = s.shape[1:3]
        smallest = torch.where(s == -math.inf, math.inf, s).amin(3)
        origin = torch.where(smallest.isfinite(), smallest, 0.0)
        weights = torch.exp(s - origin.unsqueeze(3))
        acc = (weights.flatten(1, 2) @ values.transpose(0, 1)).unflatten(1, (rows, g))
        largest = torch.where(smallest.isfinite(), smallest, -math.inf)
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, largest, weights.sum(3)))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
