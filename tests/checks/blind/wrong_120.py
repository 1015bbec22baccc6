"""Wrong: with ragged rows the first key that is read is that of the last row's window, which cuts the windows of the
rows before it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        if run.window < 0 or run.p.cu_seqlens_q is None:
            return start, end
        return min(max(0, run.lens[r] - 1 - run.window), end), end


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
