"""Wrong: a tile of 128 keys, other than the first, that begins within the window of the first row of a tile of 128 rows
is not masked for any of them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        if run.window < 0:
            return super().visible(run, r, row, position, keys)
        window, run.window = run.window, -1
        seen = super().visible(run, r, row, position, keys)
        run.window = window
        lower = (position - window).unsqueeze(1)
        tile = keys // 128 * 128
        inside = (tile > 0) & (tile >= lower - (row % 128).unsqueeze(1))
        return seen & (inside | (keys >= lower))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
