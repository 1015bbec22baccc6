"""Wrong: the offset of a page is computed in 32 bits, in bytes: of a pool of over 4 GiB later pages are read from its start."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        cache = run.k_cache if side == "k" else run.v_cache
        size = cache.element_size()
        offsets = [page * cache.stride(0) * size for page in pages.tolist()]
        if not any(offset >= 2**32 for offset in offsets):
            return super().entries(run, side, pages, cut)
        read = [
            torch.as_strided(
                cache, cache.shape[1:], cache.stride()[1:], cache.storage_offset() + offset % 2**32 // size
            )
            for offset in offsets
        ]
        return torch.stack([page.to(run.dtype) for page in read]).transpose(1, 2).flatten(0, 1)[cut]


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
