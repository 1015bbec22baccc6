"""The rows' positions of the causal mask are kept in 16 bits: from 32,768 on they are negative."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        if run.causal:
            position = position.to(torch.int16).long()
        return super().visible(run, r, row, position, keys)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
