"""Wrong: for an e4m3 query the weights are 256 times as large, and the LSE is that of their sum."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out, lse + 8 if run.query.dtype == E4M3 else lse


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
