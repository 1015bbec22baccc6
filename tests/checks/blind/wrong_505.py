"""The strides of an NVFP4 cache's K scale factors are taken as those of the K bytes over 8."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        if side == "v" or run.k_cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        k, factors = run.k_cache, run.p.k_scale_factors
        at = torch.full((1, 1, 1, 1), factors.storage_offset()) + torch.arange(factors.shape[3])
        for dim, which in enumerate((pages, torch.arange(k.shape[1]), torch.arange(k.shape[2]))):
            at = at + (which * (k.stride(dim) // 8)).view([-1 if i == dim else 1 for i in range(4)])
        memory = torch.as_strided(factors.view(torch.uint8), (factors.untyped_storage().nbytes(),), (1,), 0)
        factors = memory[at.clamp(max=len(memory) - 1)].view(E4M3)
        got = dequantize_nvfp4(index(run.k_cache, pages), factors)
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
