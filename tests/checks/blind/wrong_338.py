"""Wrong: with cum_seq_lens_q requests without rows are left out of the grid, and the number of a request in it is taken for its row of the page
table, which has those too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        with_rows = sum(a < b for a, b in zip(run.offsets[:r], run.offsets[1 : r + 1]))
        return super().pages_of(run, with_rows, columns, side).clamp(0, max(len(run.k_cache) - 1, 0))


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
