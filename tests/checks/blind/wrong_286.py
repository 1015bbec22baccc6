"""Wrong: of NVFP4's values the one that is subnormal, 0.5, is read as 0."""

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
        got = index(cache, pages).clone()
        for low, sign in ((0x01, 0x07), (0x10, 0x70)):
            got[(got & sign) == low] &= 0xFF ^ sign
        factors = run.p.k_scale_factors if side == "k" else run.v_factors
        got = dequantize_nvfp4(got, index(factors, pages))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
