"""V's NVFP4 factors are fetched with the page ids of K's table, also where V has a table of its own."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        if side == "k":
            run.k_pages = pages
        return pages

    def entries(self, run, side, pages, cut):
        if side == "k" or run.v_cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        got = dequantize_nvfp4(index(run.v_cache, pages), index(run.v_factors, run.k_pages))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
