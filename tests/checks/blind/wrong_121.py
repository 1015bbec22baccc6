"""Wrong: a tile of 64 rows ends its walk over tiles of 64 keys one key early, which shows where its first row's
position is 1 more than a multiple of 64.
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
        first = position - row % 64
        return seen & (keys < ((first + 63 + 63) // 64 * 64).unsqueeze(1))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
