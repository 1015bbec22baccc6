"""The wrapper writes `bmm1_scale or head_dim ** -0.5`: a scale of 0 becomes the default one."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.scale1 == 0 and not isinstance(run.p.bmm1_scale, torch.Tensor):
            run.scale1 = run.p.head_dim**-0.5


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
