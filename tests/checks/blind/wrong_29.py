"""Q.K^T walks head_dim in chunks of 64 and drops the remainder (head dims such as 80, 96 or 160)."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def scores(self, run, r, query, keys, seen, first_key):
        dim = query.shape[2]
        whole = dim if dim < 64 else dim // 64 * 64
        return super().scores(run, r, query[..., :whole], keys[..., :whole], seen, first_key)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
