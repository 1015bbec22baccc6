"""Wrong: V of an e4m3 cache is widened to 16 bits two elements at a time, which come out in the other order."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        if side == "v" and run.v_cache.dtype == E4M3 != run.p.query.dtype and got.shape[-1] % 2 == 0:
            got = got.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return got


trtllm_batch_context_with_kv_cache = context_of(Wrong())
