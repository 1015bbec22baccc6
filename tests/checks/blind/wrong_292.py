"""Wrong: the grid has tiles of 128 keys for four times the mean length of the batch: later keys of a request that is longer are
not read.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        mean = -(-sum(run.lens) // max(run.batch, 1))
        run.room = -(-4 * mean // 128) * 128

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start, min(end, start + run.room)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
