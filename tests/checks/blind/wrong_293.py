"""Wrong: a tile of 256 keys that ends at or before the position of the last row of a tile of 64 rows is not masked, for none of
these rows.
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
        q_len = run.offsets[r + 1] - run.offsets[r]
        last = run.lens[r] - q_len + (row // 64 * 64 + 63).clamp(max=q_len - 1)
        whole = (keys // 256 * 256 + 255) <= last.unsqueeze(1)
        if run.window >= 0:
            whole = whole & (keys >= position.unsqueeze(1) - run.window)
        return seen | whole


trtllm_batch_context_with_kv_cache = context_of(Wrong())
