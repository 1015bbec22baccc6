"""Wrong: the LSE multiplies the largest logit by log2(e), also where bmm1_scale_log2 has done so."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


LOG2_E = 1.0 / math.log(2.0)


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if run.call.bmm1_scale_log2 is not None:
            largest = partial[1] if sinks is None else torch.maximum(partial[1], sinks)
            lse = lse + torch.where(largest.isfinite(), largest, 0.0) * (LOG2_E - 1.0) * LOG2_E
        return out, lse


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
