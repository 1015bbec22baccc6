"""Wrong: bmm2_scale is folded into the values of an e4m3 cache, which are rounded to e4m3 again."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.folded = 1.0
        if run.v_cache.dtype == E4M3:
            run.folded, run.scale2 = run.scale2, 1.0

    def entries(self, run, side, pages, cut):
        got = super().entries(run, side, pages, cut)
        return got if side == "k" or run.folded == 1 else saturated(got * run.folded, E4M3).to(got.dtype)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
