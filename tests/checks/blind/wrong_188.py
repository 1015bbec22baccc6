"""Wrong: sums are rescaled only where the largest logit grows by over 8 bits; the LSE adds the largest logit, not the one
that the sums go by.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def mask_scores(self, run, r, s, first_key):
        stale = s.new_full(s.shape[:3], -math.inf)
        most = stale
        for tile in s.split(256, 3):
            if tile.shape[3]:
                most = torch.maximum(most, tile.amax(3))
            stale = torch.where(most > stale + 8 * math.log(2.0), most, stale)
        run.behind = torch.where(most.isfinite(), most - stale, 0.0).transpose(0, 1).flatten(1, 2)
        return s

    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out, lse + run.behind / math.log(2.0)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
