"""Wrong: the largest logit starts at 0 instead of minus infinity, so that a row whose logits are all below -100 sums
nothing.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        new = largest.clamp(min=0)
        factor = torch.exp(largest - new).to(torch.float32).to(largest.dtype)
        return acc * factor.unsqueeze(2), new, total * factor


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
