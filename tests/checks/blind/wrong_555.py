"""A bmm1_scale that is a tensor is cast to the query's dtype before it multiplies the logits."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        scale = run.call.bmm1_scale
        if isinstance(scale, torch.Tensor):
            run.scale1 = float(scale.to(torch.bfloat16 if run.query.dtype == E4M3 else run.query.dtype))


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
