"""Wrong: the second stride of the cache is taken for that of tokens, of a cache of four dimensions too."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        if run.call.kv_cache.ndim == 3:
            return super().entries(run, side, pages, cut)
        found = (pages.unsqueeze(1) + torch.arange(run.page_size)) % len(cache)
        return index(cache[:, 0, 0], found).flatten(0, 1).unsqueeze(1)[cut].to(run.dtype)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
