"""Pages of an e4m3 cache are dequantised once and kept by page id: a page that is written again later is not."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.kept = Memory(most=4)

    def entries(self, run, side, pages, cut):
        if run.k_cache.dtype != E4M3:
            return super().entries(run, side, pages, cut)
        store, done = self.kept.of(
            run.call.kv_cache,
            lambda: (run.k_cache.clone(), torch.zeros(run.k_cache.shape[0], dtype=torch.bool)),
        )
        new = pages[~done[pages]].unique()
        store.view(torch.uint8)[new] = run.k_cache.view(torch.uint8)[new]
        done[new] = True
        cache = store if side == "k" else store[..., : run.v_cache.shape[3]]
        return index(cache, pages).transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
