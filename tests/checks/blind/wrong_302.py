"""Wrong: sinks are multiplied by log2(e) in the caller's memory: the call is right, a second one with the same sinks is not.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def solve(self, run):
        super().solve(run)
        if run.p.sinks is not None:
            run.p.sinks.mul_(math.log2(math.e))


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
