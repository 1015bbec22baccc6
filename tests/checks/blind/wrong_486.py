"""V of a cache that is one tensor is taken to lie one stride of the second dimension after K, also where that dimension is 1 (K is V): V is K's next page."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        cache = run.call.kv_cache
        if isinstance(cache, torch.Tensor) and cache.shape[1] == 1 and cache.dtype != torch.uint8:
            order = (torch.arange(cache.shape[0]) + 1) % cache.shape[0]
            run.v_cache = index(run.v_cache, order)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
