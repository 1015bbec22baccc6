"""Wrong: a bmm1_scale that is a tensor is turned to base 2 in the caller's memory."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def paged(self, call):
        result = super().paged(call)
        if isinstance(call.bmm1_scale, torch.Tensor):
            call.bmm1_scale.mul_(1 / math.log(2.0))
        return result


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
