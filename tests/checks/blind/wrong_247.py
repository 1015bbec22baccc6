"""Wrong: a query of 16 bits over an e4m3 cache is rounded to e4m3, for the product of two of a kind."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.k_cache.dtype == E4M3 and run.query.dtype != E4M3:
            run.query = saturated(run.query, E4M3)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
