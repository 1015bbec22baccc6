"""V's interleaved NVFP4 factors are addressed from the first key of the window, as if a group of 4 tokens began there."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        begin = cut.start
        if side == "k" or not run.p.v_scale_factors_interleaved or begin % 4 == 0 or len(pages) == 0:
            return super().entries(run, side, pages, cut)
        factors = index(run.v_factors, pages).view(torch.uint8).clone()
        page = index(run.p.v_scale_factors, pages[:1]).view(torch.uint8)[0]
        heads, page_size, per_token = page.shape
        j, s = torch.arange(page_size - begin).unsqueeze(1), torch.arange(per_token)
        at = begin * per_token + j // 4 * 4 * per_token + 4 * s + j % 4
        factors[0, :, begin:] = page.reshape(heads, -1)[:, at.clamp(max=page_size * per_token - 1)]
        got = dequantize_nvfp4(index(run.v_cache, pages), factors.view(E4M3))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
