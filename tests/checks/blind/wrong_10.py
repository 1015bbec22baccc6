"""bmm1_scale wins over bmm1_scale_log2 when both are tensors."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if isinstance(run.call.bmm1_scale, torch.Tensor):
            run.scale1 = float(run.call.bmm1_scale)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
