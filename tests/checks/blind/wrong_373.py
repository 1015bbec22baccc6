"""Wrong: a row that sees no key subtracts the largest logit from the sink: of a head without a sink that is infinity minus infinity, NaN.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if sinks is not None:
            wrong = ~seen.any(1, keepdim=True) & (sinks == -math.inf)
            out, lse = torch.where(wrong.unsqueeze(2), math.nan, out), torch.where(wrong, math.nan, lse)
        return out, lse


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
