"""Of a one-tensor cache V is found stride(1) after K: where the second dimension is 1 (K is V), that is the next page."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        cache = run.call.kv_cache
        if side == "v" and isinstance(cache, torch.Tensor) and cache.shape[1] == 1:
            pages = (pages + 1) % cache.shape[0]
        return pages


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
