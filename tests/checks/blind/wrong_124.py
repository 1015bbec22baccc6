"""Wrong: with causal=False tiles of 64 rows still end at the tile of keys of their own diagonal, all but a request's
last tile.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.causal:
            return seen
        width = run.offsets[r + 1] - run.offsets[r]
        is_last = row // 64 == (width - 1) // 64
        end = ((position - row % 64 + 64 + 63) // 64 * 64).unsqueeze(1)
        return seen & (is_last.unsqueeze(1) | (keys < end))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
