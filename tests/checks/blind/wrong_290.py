"""Wrong: a request whose first page is page 0 is taken for padding of a CUDA graph, which an engine lays over that page, and is
left as zero.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def request(self, run, r):
        first, last = run.offsets[r : r + 2]
        if first == last or run.lens[r] == 0 or int(run.k_table[r, 0]) != 0:
            super().request(run, r)
            return
        run.out[first:last] = 0
        if run.lse is not None:
            run.lse[first:last] = -math.inf


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
