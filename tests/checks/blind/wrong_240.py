"""Wrong: 16 rows of a head share one largest logit, so that a row whose own is far below has weights of zero."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        s = self.scores(run, r, query, keys, seen, first_key)
        h, rows, g, n = s.shape
        largest = s.amax(3) if n else s.new_full((h, rows, g), -math.inf)
        largest = torch.cat([x.amax(1, keepdim=True).expand_as(x) for x in largest.split(16, 1)], 1)
        weights = torch.exp(s - torch.where(largest.isfinite(), largest, 0.0).unsqueeze(3))
        acc = (weights.flatten(1, 2) @ values.transpose(0, 1)).unflatten(1, (rows, g))
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, largest, weights.sum(3)))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
