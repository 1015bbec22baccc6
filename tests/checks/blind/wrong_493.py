"""The LSE's rows are written by their stride, and its heads side by side: one that is the transpose of [heads, rows] is scrambled."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.lse is not None and run.lse.stride(1) != 1:
            run.lse = assuming_strides(run.lse, (run.lse.stride(0), 1))


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
