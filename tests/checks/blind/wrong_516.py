"""bmm2_scale, where it is a number, is handed to the kernel in the query's bfloat16: it is off by up to 0.39 %."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.p.query.dtype == torch.bfloat16 and not isinstance(run.call.bmm2_scale, torch.Tensor):
            run.scale2 = float(torch.tensor(run.scale2).to(torch.bfloat16))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
