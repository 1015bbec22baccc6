"""Wrong: the strides of heads and tokens are computed from kv_layout and the shape; only that of pages is the tensor's
own.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.k_cache, run.v_cache = (self.by_layout(run, cache) for cache in (run.k_cache, run.v_cache))

    def by_layout(self, run, cache):
        _, heads, tokens, last = cache.shape
        inner = (tokens * last, last) if run.call.kv_layout == "HND" else (last, heads * last)
        return assuming_strides(cache, (cache.stride(0), *inner, 1))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
