"""Wrong: an NHD cache that is one tensor is taken for [num_pages, page_size, 2, num_kv_heads, head_dim], with K and V
of a token side by side.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        cache = run.call.kv_cache
        if isinstance(cache, torch.Tensor) and run.call.kv_layout == "NHD" and cache.shape[1] == 2:
            pages, _, page_size, heads, dim = cache.shape
            both = cache.reshape(pages, page_size, 2, heads, dim)
            run.k_cache, run.v_cache = (both[:, :, i].transpose(1, 2) for i in (0, 1))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
