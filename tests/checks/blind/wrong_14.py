"""A bmm2_scale tensor is passed on by pointer only if it has one dimension: one without dimensions leaves the default, 1."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if isinstance(run.call.bmm2_scale, torch.Tensor) and run.call.bmm2_scale.ndim == 0:
            run.scale2 = 1.0


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
