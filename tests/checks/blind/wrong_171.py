"""Wrong: with a draft mask the window of a row is counted from its depth in the tree, the number of draft tokens that
it sees, not from its row.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.shown is None or run.window < 0:
            return seen
        window, run.window = run.window, -1
        seen = super().visible(run, r, row, position, keys)
        run.window = window
        depth = (run.shown[r][row].sum(1) - 1).clamp(min=0)
        return seen & (keys >= (run.lens[r] - run.shown.shape[1] + depth - window).unsqueeze(1))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
