"""Wrong: a split of 256 keys that lies wholly before the window returns early with a weight of 1 at logit 0, which the merge counts."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


SPLIT = 256


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        skipped = first_key // SPLIT if run.window >= 0 else 0
        if skipped == 0:
            return acc, largest, total
        left = torch.zeros_like(acc), torch.zeros_like(largest), torch.full_like(total, skipped)
        return self.merge([(acc, largest, total), left])


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
