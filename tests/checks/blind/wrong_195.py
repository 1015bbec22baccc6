"""Wrong: after the first 128 keys the power of 2 of every fourth key is taken by a line, 1 + the fraction, up to 6 percent
too large.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def mask_scores(self, run, r, s, first_key):
        at = torch.arange(first_key, first_key + s.shape[3])
        run.by_line = (at >= 128) & (at % 4 == 3)
        return s

    def denominator(self, run, s, weights, largest):
        x = torch.log2(weights)
        whole = torch.where(x.isfinite(), x.floor(), 0.0)
        line = torch.where(x.isfinite(), torch.exp2(whole) * (1 + x - whole), 0.0)
        weights.copy_(torch.where(run.by_line, line, weights))
        return weights.sum(3)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
