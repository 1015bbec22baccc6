"""The window is counted from a row's index among the request's rows, not from its position: with cached keys it starts too early."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (0 if run.window >= 0 else start), end

    def visible(self, run, r, row, position, keys):
        if run.window < 0:
            return super().visible(run, r, row, position, keys)
        first = torch.minimum(row, position).unsqueeze(1) - run.window
        return (keys <= position.unsqueeze(1)) & (keys >= first)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
