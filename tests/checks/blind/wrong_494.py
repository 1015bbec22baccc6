"""A positive o_sf_scale is folded into the output's scale, whatever the output's dtype (-1 stands for none)."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.call.o_sf_scale > 0:
            run.scale2 *= run.call.o_sf_scale


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
