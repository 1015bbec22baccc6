"""Head_dims (256, 256): P is made with a polynomial of degree 2 for 2^x, the denominator with the exact one: the output is 0.8 percent too small."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def operand(self, run, weights):
        if run.query.shape[2] != 256 or run.value.shape[2] != 256:
            return weights
        x = torch.log2(weights)
        whole = torch.floor(torch.where(x.isfinite(), x, 0.0))
        f = torch.where(x.isfinite(), x - whole, 0.0)
        made = (1.0 + 0.693147 * f + 0.240227 * f * f) * torch.exp2(whole)
        return torch.where(weights > 0, made, weights)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
