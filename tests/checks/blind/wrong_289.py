"""Wrong: an e4m3 cache is converted as if an exponent of ones meant infinity or NaN, as IEEE's formats have it: 256 becomes
infinite, 288 to 448 NaN.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        cache = run.k_cache if side == "k" else run.v_cache
        if cache.dtype != E4M3:
            return got
        got = torch.where(got.abs() > 256, torch.nan, got)
        return torch.where(got.abs() == 256, got * torch.inf, got)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
