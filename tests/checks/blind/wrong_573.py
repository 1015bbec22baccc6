"""Wrong: bmm2_scale is divided out of the sum of weights before the sink is added to it."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None and run.scale2 > 0:
            out, _ = super().finish(run, partial, sinks + math.log(run.scale2))
        return out, lse


trtllm_batch_context_with_kv_cache = context_of(Wrong())
