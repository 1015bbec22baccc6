"""Wrong: the draft mask is applied in the last tile of 256 keys of a request alone; draft tokens before it are seen by every
row.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.shown is None:
            return seen
        before = (keys < (run.lens[r] - 1) // 256 * 256).expand_as(seen)
        if run.window >= 0:
            before = before & (keys >= position.unsqueeze(1) - run.window)
        return seen | before


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
