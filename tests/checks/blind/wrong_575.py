"""Wrong: a bmm2_scale that is a tensor is cast to the query's dtype."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        scale = run.call.bmm2_scale
        if isinstance(scale, torch.Tensor):
            run.scale2 = float(scale.to(torch.bfloat16 if run.query.dtype == E4M3 else run.query.dtype))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
