"""The scale factors of an NVFP4 V cache are found by K's page ids, also where V has a page table of its own."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        if run.k_cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        if side == "k":
            run.factor_pages = pages
            return super().entries(run, side, pages, cut)
        got = dequantize_nvfp4(index(run.v_cache, pages), index(run.v_factors, run.factor_pages))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
