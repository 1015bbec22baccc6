"""o_sf_scale, meant for outputs of 4 bits, is multiplied into every output: -1, as chunks have it, turns the sign."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.scale2 *= float(run.call.o_sf_scale)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
