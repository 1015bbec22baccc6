"""Wrong: K's scale factors of an NVFP4 cache in the layout NHD are read in the order of HND."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        factors = run.p.k_scale_factors
        if side == "v" or factors is None or run.call.kv_layout == "HND":
            return super().entries(run, side, pages, cut)
        factors = assuming_strides(factors, packed_strides(factors.shape))
        got = dequantize_nvfp4(index(run.k_cache, pages), index(factors, pages))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
