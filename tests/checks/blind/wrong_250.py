"""Wrong: the XQA path leaves the LSE a natural logarithm unless base 2 is asked for by name."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        call = run.call
        if call.backend == "xqa" and call.return_lse_base is None:
            lse = lse * math.log(2.0)
        super().store(run, r, start, stop, out, lse)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
