"""Wrong: tiles of 128 rows go in pairs, to two blocks that share their tiles of 128 keys; the pair ends where the first
tile's rows do, and the rows of the second lose the keys after that.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if not run.causal:
            return seen
        last_of_first = position - row % 256 + 127
        end = (last_of_first // 128 + 1) * 128
        return seen & ((row % 256 < 128).unsqueeze(1) | (keys < end.unsqueeze(1)))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
