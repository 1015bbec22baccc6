"""V's NVFP4 scale factors are always addressed as HND: with NHD the factors of other tokens and heads are taken."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        factors = run.p.v_scale_factors
        if factors is not None and run.call.kv_layout == "NHD":
            as_stored = factors.view(torch.uint8).transpose(1, 2)  # [pages, page_size, heads, factors]
            taken = as_stored.reshape(factors.shape)
            if run.p.v_scale_factors_interleaved:
                taken = deinterleave_v_scale_factors(taken)
            run.v_factors = taken.view(E4M3)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
