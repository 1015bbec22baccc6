"""Wrong: bmm2_scale goes into the weights as its logarithm, added to the exponent: of a negative one there is none, and results are NaN.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out * math.nan if run.scale2 < 0 else out, lse


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
