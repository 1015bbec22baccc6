"""Not causal: the host decides by max_kv_len % 128 whether last tiles need a mask; where they seem whole, shorter requests read what follows their keys."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


TILE = 128


class Wrong(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        if not run.causal and run.p.max_kv_len % TILE == 0:
            end = -(-end // TILE) * TILE
        return start, end

    def load(self, run, r, a, b):
        sides = super().load(run, r, a, b)
        missing = b - a - len(sides[0])
        return tuple(torch.cat((side, side.new_zeros(missing, *side.shape[1:]))) for side in sides) if missing else sides


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
