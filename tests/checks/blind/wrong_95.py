"""V's tile has head_dim columns, as K's: of a wider V the columns after them come out zero."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def load(self, run, r, a, b):
        keys, values = super().load(run, r, a, b)
        inside = torch.arange(values.shape[2]) < keys.shape[2]
        return keys, torch.where(inside, values, 0.0)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
