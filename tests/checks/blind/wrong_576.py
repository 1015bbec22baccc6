"""Wrong: pages of an e4m3 cache are converted when they are first read, and kept: what is written to them later is not seen."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.converted = Memory()

    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        if cache.dtype != E4M3 or run.query.dtype == E4M3 or len(pages) == 0:
            return super().entries(run, side, pages, cut)
        kept = self.converted.of(cache, dict)
        for page in pages.tolist():
            if page not in kept:
                kept[page] = index(cache, page).to(run.dtype)
        return torch.stack([kept[page] for page in pages.tolist()]).transpose(1, 2).flatten(0, 1)[cut]


trtllm_batch_context_with_kv_cache = context_of(Wrong())
