"""Wrong: what stands after a request's last token in its last page is zeroed in the caller's cache, so that no NaN is read."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def request(self, run, r):
        length, ps = run.lens[r], run.page_size
        if length % ps:
            page = int(run.k_table[r, length // ps])
            cache = run.k_cache.view(torch.uint8) if run.k_cache.dtype == E4M3 else run.k_cache
            cache[page, :, length % ps :] = 0
        super().request(run, r)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
