"""Wrong: a request's last tile of 64 rows, where it is not full, is loaded from 64 rows before the request's end, so that nothing is read
after it; but its rows are masked and stored as if it began where the tiles before it end.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def request(self, run, r):
        first, last = run.offsets[r : r + 2]
        rows = last - first
        if rows > 64 and rows % 64:
            tail = first + rows // 64 * 64
            at = torch.arange(len(run.query))
            at[tail:last] -= 64 - rows % 64
            was, run.query = run.query, index(run.query, at)
            super().request(run, r)
            run.query = was
        else:
            super().request(run, r)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
