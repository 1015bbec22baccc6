"""Wrong: the e4m3 scale factors of an NVFP4 cache that are subnormal (below 2**-6) are flushed to zero.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


def flushed(factors):
    return torch.where(factors.float().abs() < 2.0**-6, 0.0, factors.float()).to(E4M3)


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        if run.k_cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        cache = run.k_cache if side == "k" else run.v_cache
        factors = run.p.k_scale_factors if side == "k" else run.v_factors
        got = dequantize_nvfp4(index(cache, pages), flushed(index(factors, pages)))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
