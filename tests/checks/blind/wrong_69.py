"""The layout is told by the cache's shape, not by kv_layout: where page_size is num_kv_heads, NHD is read as HND."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        alike = run.page_size == run.num_kv_heads and run.p.k_scale_factors is None
        if run.call.kv_layout == "NHD" and alike:
            run.k_cache, run.v_cache = run.k_cache.transpose(1, 2), run.v_cache.transpose(1, 2)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
