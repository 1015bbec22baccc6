"""Wrong: V's interleaved NVFP4 scale factors are loaded from the block of four tokens that holds a window's first key, and used as if that
key were the block's first.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        shift = cut.start % 4
        if side == "k" or run.v_cache.dtype != torch.uint8 or not run.p.v_scale_factors_interleaved or run.window < 0 or not shift:
            return super().entries(run, side, pages, cut)
        factors = index(run.v_factors, pages).view(torch.uint8).transpose(1, 2)
        tokens = factors.flatten(0, 1)
        tokens = tokens[(torch.arange(len(tokens)) - shift).clamp(min=0)]
        shifted = tokens.view(factors.shape).transpose(1, 2).contiguous().view(E4M3)
        got = dequantize_nvfp4(index(run.v_cache, pages), shifted)
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
