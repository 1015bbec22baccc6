"""Wrong: a request without cached keys goes down a path that takes its pages to follow its first one in the pool."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        is_new = run.offsets[r + 1] - run.offsets[r] == run.lens[r]
        if not is_new:
            return pages
        table = run.k_table if side == "k" else run.v_table
        return (table[r, 0].long() + columns).clamp(max=run.k_cache.shape[0] - 1)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
