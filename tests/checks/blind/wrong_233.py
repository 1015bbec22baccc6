"""Wrong: with ragged rows every request gets a tile of at least one row; one without rows writes the next request's first row,
which is done before it, from the last request to the first."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def solve(self, run):
        super().solve(run)
        if run.p.cu_seqlens_q is None:
            return
        for r in reversed(range(run.batch)):
            first, last = run.offsets[r : r + 2]
            if first == last and first < run.offsets[-1]:
                run.offsets[r + 1] = first + 1
                self.request(run, r)
                run.offsets[r + 1] = last


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
