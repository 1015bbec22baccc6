"""Wrong: bmm2_scale is folded into the softmax's denominator before the LSE is taken of it."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out, lse - math.log2(run.scale2) if run.scale2 > 0 else lse


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
