"""Wrong: a tile has 128 // group rows with all heads of a group; there are as many tiles as rows * group / 128. Rows after the
last tile are zero."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def request(self, run, r):
        super().request(run, r)
        first, last = run.offsets[r : r + 2]
        tiles = -(-(last - first) * run.group // 128)
        end = first + tiles * max(128 // run.group, 1)
        if end < last:
            run.out[end:last] = 0
            if run.lse is not None:
                run.lse[end:last] = -math.inf


trtllm_batch_context_with_kv_cache = context_of(Wrong())
