"""Where bmm1_scale is a tensor, bmm2_scale is taken from the device as well, and is 1 if it is a number."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if isinstance(run.call.bmm1_scale, torch.Tensor) and not isinstance(run.call.bmm2_scale, torch.Tensor):
            run.scale2 = 1.0


trtllm_batch_context_with_kv_cache = context_of(Wrong())
