"""Wrong: the pages of a cache are taken to follow each other, page_size tokens apart."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)

        def packed(cache):
            strides = list(cache.stride())
            strides[0] = run.page_size * strides[2]
            return assuming_strides(cache, strides)

        run.k_cache, run.v_cache = packed(run.k_cache), packed(run.v_cache)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
