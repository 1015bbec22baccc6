"""A page's offset in bytes, page times stride, is computed in 32 bits without sign: it wraps at 4 GiB."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        step = cache.stride(0) * cache.element_size()
        if cache.dtype == torch.uint8 or not len(pages) or int(pages.max()) * step < 2**32:
            return super().entries(run, side, pages, cut)
        at = (pages * step % 2**32 // cache.element_size()).tolist()
        origin = cache.storage_offset()
        got = [torch.as_strided(cache, cache.shape[1:], cache.stride()[1:], origin + a).to(run.dtype) for a in at]
        return torch.stack(got).transpose(1, 2).flatten(0, 1)[cut]


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
