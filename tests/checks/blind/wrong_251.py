"""Wrong: with at most 8 heads two rows of a request make one tile of 16, which ends where its second row does: the first one
sees the second one's token.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def positions(self, run, r, row):
        if run.p.num_qo_heads <= 8:
            last = run.offsets[r + 1] - run.offsets[r] - 1
            row = (row | 1).clamp(max=last)
        return super().positions(run, r, row)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
