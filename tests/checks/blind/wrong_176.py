"""Wrong: K's NVFP4 scale factors are read as V's are, interleaved over four tokens, although K's are in plain order."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        if side == "v" or run.k_cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        factors = index(run.p.k_scale_factors, pages).view(torch.uint8)
        got = dequantize_nvfp4(index(run.k_cache, pages), deinterleave_v_scale_factors(factors).view(E4M3))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
