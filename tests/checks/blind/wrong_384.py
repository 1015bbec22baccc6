"""Wrong: a row's request is found by a multiplication that stands for the division by q_len_per_req, with 12 bits after the
point: from some row on the last row of a request is taken for one before the first of the next request.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def solve(self, run):
        super().solve(run)
        q_len = run.p.max_q_len
        if run.p.cu_seqlens_q is not None or q_len == 0:
            return
        magic = -(-4096 // q_len)
        for row in range(run.offsets[-1]):
            r = row * magic >> 12
            if r != row // q_len and r < run.batch:
                self.rows(run, r, row, row + 1)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
