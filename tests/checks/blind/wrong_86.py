"""Within a page, entries are taken to lie kv_lora_rank + qk_rope_head_dim elements apart: entries with gaps between them are read from the wrong places."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        cache = run.k_cache
        pages, heads, _, element = cache.stride()
        run.k_cache = assuming_strides(cache, (pages, heads, cache.shape[3], element))
        run.v_cache = run.k_cache[..., : run.v_cache.shape[3]]


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
