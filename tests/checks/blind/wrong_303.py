"""Wrong: the subnormals of a float16 cache (below 2**-14) are flushed to zero."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        cache = run.k_cache if side == "k" else run.v_cache
        return torch.where(got.abs() < 2.0**-14, 0.0, got) if cache.dtype == torch.float16 else got


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
