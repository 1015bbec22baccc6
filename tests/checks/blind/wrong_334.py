"""Wrong: a request whose new tokens are all its keys goes down a path without a page table; from 65 rows on, where that takes more than one tile,
its results come out half a percent too small.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        rows = run.offsets[r + 1] - run.offsets[r]
        if rows == run.lens[r] and rows > 64:
            out = out * 0.995
        super().store(run, r, start, stop, out, lse)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
