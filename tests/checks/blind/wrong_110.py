"""Wrong: four NVFP4 scale factors are loaded as one word, which serves elements from 64 on as it served the first 64."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        if cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        factors = index(run.p.k_scale_factors if side == "k" else run.v_factors, pages).view(torch.uint8)
        word = factors[..., torch.arange(factors.shape[3]) % 4].view(E4M3)
        got = dequantize_nvfp4(index(cache, pages), word)
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
