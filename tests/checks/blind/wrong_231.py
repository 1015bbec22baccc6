"""Wrong: a bfloat16 cache is converted to float16, the one dtype of the kernel's products."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        cache = run.k_cache if side == "k" else run.v_cache
        return got.to(torch.float16).to(run.dtype) if cache.dtype == torch.bfloat16 else got


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
