"""Wrong: a stride of 0 between a cache's K/V heads, as an expanded one has it, is taken for a missing one and replaced by that of packed
heads: head h is read h pages later.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        heads = cache.shape[1]
        if heads == 1 or cache.stride(1) != 0:
            return super().entries(run, side, pages, cut)
        read = [super(Wrong, self).entries(run, side, (pages + h) % len(cache), cut)[:, h] for h in range(heads)]
        return torch.stack(read, 1)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
