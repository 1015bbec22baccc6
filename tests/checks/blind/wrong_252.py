"""Wrong: the largest logit is kept for a head, over all rows of its request: the weights of a row whose logits are far below
another's vanish.
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
        largest = s.amax((1, 3)) if n else s.new_full((h, g), -torch.inf)
        largest = largest.unsqueeze(1).expand(h, rows, g)
        weights = torch.exp(s - torch.where(largest.isfinite(), largest, 0.0).unsqueeze(3))
        acc = (weights.flatten(1, 2) @ values.transpose(0, 1)).unflatten(1, (rows, g))
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, largest, weights.sum(3)))


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
