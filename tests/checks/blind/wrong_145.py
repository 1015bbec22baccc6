"""Wrong: the LSE of a row without keys is plus infinity, as FlashAttention has it."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        super().store(run, r, start, stop, out, torch.where(lse == -math.inf, math.inf, lse))


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
