"""Wrong: the tokens of V are taken to be as far apart as its heads take up."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        value = run.value
        run.value = assuming_strides(value, (value.shape[1] * value.stride(1), value.stride(1), 1))


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
