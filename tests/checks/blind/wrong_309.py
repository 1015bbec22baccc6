"""Wrong: the largest logit is found by an atomic maximum of integers, the floats' bits: of negative numbers alone it finds the
smallest, and weights overflow where logits are far apart.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        s = self.scores(run, r, query, keys, seen, first_key)
        h, rows, g, n = s.shape
        if not n:
            return super().partial(run, r, query, keys, values, seen, first_key)
        largest, smallest = s.amax(3), s.masked_fill(s == -math.inf, math.inf).amin(3)
        largest = torch.where((largest < 0) & smallest.isfinite(), smallest, largest)
        origin = torch.where(largest.isfinite(), largest, 0.0)
        weights = torch.exp(s - origin.unsqueeze(3))
        acc = (weights.flatten(1, 2) @ values.transpose(0, 1)).unflatten(1, (rows, g))
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, largest, weights.sum(3)))


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
