"""Pages are taken to lie page_size * head_dim elements apart: a cache whose pages have gaps between them is read from the wrong places."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        strides = packed_strides(run.k_cache.shape)
        run.k_cache = assuming_strides(run.k_cache, (strides[0], *run.k_cache.stride()[1:]))
        run.v_cache = run.k_cache[..., : run.v_cache.shape[3]]


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
