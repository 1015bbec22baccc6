"""The last row of each tile of 64 rows of a request comes out half a percent too small."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        last = (torch.arange(start, stop) - run.offsets[r]) % 64 == 63
        out = torch.where(last[:, None, None], out * 0.995, out)
        super().store(run, r, start, stop, out, lse)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
