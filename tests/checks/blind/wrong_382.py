"""Wrong: with ragged rows a row's position is counted from max_q_len, the rows that the grid is made for, not from the rows of
its request: those of a narrower request see fewer keys.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def positions(self, run, r, row):
        if run.p.cu_seqlens_q is None:
            return super().positions(run, r, row)
        return run.lens[r] - run.p.max_q_len + row


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
