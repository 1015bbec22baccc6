"""Wrong: two requests next to each other of at most 8 new tokens each, 2 i and 2 i + 1, share a tile, whose causal mask is that of the
first one's cached prefix.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def positions(self, run, r, row):
        rows = [b - a for a, b in zip(run.offsets, run.offsets[1:])]
        if r % 2 and 0 < rows[r - 1] <= 8 and rows[r] <= 8:
            return run.lens[r - 1] - rows[r - 1] + row
        return super().positions(run, r, row)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
