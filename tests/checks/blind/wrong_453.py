"""e4m3 queries: the largest logit is renewed only when it grows by 8 (base 2), and P, times 256, saturates at 448 before that."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


TILE, LAZY, FACTOR = 128, 8.0, 256.0


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        if run.query.dtype != E4M3 or len(keys) <= TILE:
            return super().partial(run, r, query, keys, values, seen, first_key)
        s = self.scores(run, r, query, keys, seen, first_key)
        h, rows, g, n = s.shape
        stale = s.new_full((h, rows, g), -math.inf)
        total, acc = s.new_zeros(h, rows, g), s.new_zeros(h, rows, g, values.shape[2])
        for at in range(0, n, TILE):
            tile = s[..., at : at + TILE]
            largest = tile.amax(3)
            grown = (largest - stale) / math.log(2.0)
            new = torch.where((largest > -math.inf) & ((stale == -math.inf) | (grown > LAZY)), largest, stale)
            origin = torch.where(new.isfinite(), new, 0.0)
            factor = torch.where(stale.isfinite(), torch.exp(stale - origin), 0.0)
            weights = torch.exp(tile - origin.unsqueeze(3))
            total = total * factor + weights.sum(3)
            stored = weights.clamp(max=448.0 / FACTOR).flatten(1, 2)
            v = values[at : at + TILE].transpose(0, 1)
            acc = acc * factor.unsqueeze(3) + (stored @ v).unflatten(1, (rows, g))
            stale = new
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in (acc, stale, total))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
