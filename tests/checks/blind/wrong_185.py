"""Wrong: sums are rescaled only where the largest logit grows by over 12 bits; for an e4m3 query, weights that have grown
beyond 448 since saturate.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        if run.query.dtype != E4M3:
            return super().partial(run, r, query, keys, values, seen, first_key)
        s = self.scores(run, r, query, keys, seen, first_key)
        if s.shape[3] == 0:
            return super().partial(run, r, query, keys, values, seen, first_key)
        h, rows, g, _ = s.shape
        origin, total = s.new_full((h, rows, g), -math.inf), s.new_zeros(h, rows, g)
        acc = s.new_zeros(h, rows, g, values.shape[2])
        for tile, side in zip(s.split(128, 3), values.split(128)):
            most = tile.amax(3)
            new = torch.where(most > origin + 12 * math.log(2.0), most, origin)
            safe = torch.where(new.isfinite(), new, 0.0)
            factor = torch.where(origin.isfinite(), torch.exp(origin - safe), 0.0)
            weights = torch.exp(tile - safe.unsqueeze(3))
            total = total * factor + weights.sum(3)
            sums = (weights.clamp(max=448.0).flatten(1, 2) @ side.transpose(0, 1)).unflatten(1, (rows, g))
            acc, origin = acc * factor.unsqueeze(3) + sums, new
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, origin, total))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
