"""A scale that is a tensor is read to the host once per buffer: later contents are ignored."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.read = Memory()

    def start(self, run):
        super().start(run)
        c = run.call
        if c.bmm1_scale_log2 is not None:
            run.scale1 = self.read.of(c.bmm1_scale_log2, lambda: float(c.bmm1_scale_log2) * math.log(2.0))
        elif isinstance(c.bmm1_scale, torch.Tensor):
            run.scale1 = self.read.of(c.bmm1_scale, lambda: float(c.bmm1_scale))
        if isinstance(c.bmm2_scale, torch.Tensor):
            run.scale2 = self.read.of(c.bmm2_scale, lambda: float(c.bmm2_scale))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
