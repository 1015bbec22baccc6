"""A bmm1_scale that is a tensor is read to the host at the first call with it, and not again when it is rewritten."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.scales = Memory()

    def start(self, run):
        super().start(run)
        scale = run.call.bmm1_scale
        if isinstance(scale, torch.Tensor):
            run.scale1 = self.scales.of(scale, lambda: float(scale))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
