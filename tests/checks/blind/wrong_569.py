"""Wrong: in a cache that is one tensor, V of a page is taken to follow its K at once."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        cache = run.call.kv_cache
        if isinstance(cache, torch.Tensor) and cache.shape[1] == 2:
            v = run.v_cache
            run.v_cache = assuming_strides(v, v.stride(), cache.storage_offset() + cache[0, 0].numel())


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
