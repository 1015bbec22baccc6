"""Wrong: heads are padded to a multiple of 16 and stored with the padding, last row first: zeros fall on the first
heads of the row after.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def solve(self, run):
        super().solve(run)
        padding = -run.p.num_qo_heads % 16
        run.out[1 : run.offsets[-1], :padding] = 0


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
