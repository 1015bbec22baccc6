"""Wrong: V's NVFP4 scale factors are looked up through K's page table."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        if side == "k":
            run.factor_pages = pages
        return pages

    def entries(self, run, side, pages, cut):
        if side == "k" or run.v_cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        got = dequantize_nvfp4(index(run.v_cache, pages), index(run.v_factors, run.factor_pages))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
