"""o_sf_scale is folded into the factor of the output, though outputs of 16 bits have none: the chunks of a prefix, with -1, come out negated."""

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
