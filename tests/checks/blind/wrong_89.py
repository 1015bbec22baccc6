"""The causal mask is applied in a request's last split (1,024 keys) only: draft tokens before it are visible to earlier rows."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        last_split = max(run.lens[r] - 1, 0) // 1024 * 1024
        return super().visible(run, r, row, position, keys) | (keys < last_split)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
