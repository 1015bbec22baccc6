"""The window is measured from the row's number among the new tokens, not from its position after the cached ones."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def span(self, run, r, position):
        return 0, super().span(run, r, position)[1]

    def visible(self, run, r, row, position, keys):
        if not run.causal or run.window < 0:
            return super().visible(run, r, row, position, keys)
        return (keys <= position[:, None]) & (keys >= row[:, None] - run.window)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
