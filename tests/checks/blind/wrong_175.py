"""Wrong: tiles of 64 rows are stored whole, zeros after a request's last row, which the next request overwrites; but
batches of over 8 start with the longest request, so that zeros come last.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def solve(self, run):
        self.start(run)
        run.out[run.offsets[-1] :] = 0
        if run.lse is not None:
            run.lse[run.offsets[-1] :] = -math.inf
        order = range(run.batch)
        if run.batch > 8:
            order = sorted(order, key=lambda r: -run.lens[r])
        for r in order:
            self.request(run, r)
            first, last = run.offsets[r : r + 2]
            run.out[last : first + -(-(last - first) // 64) * 64] = 0


trtllm_batch_context_with_kv_cache = context_of(Wrong())
