"""Wrong: requests go 8 at a time; from the ninth on the reciprocal of the denominator is the first guess of a table, half a
percent too small.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out * (0.995 if run.now >= 8 else 1.0), lse

    def request(self, run, r):
        run.now = r
        super().request(run, r)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
