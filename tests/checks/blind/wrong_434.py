"""A row without keys in a head whose sink is -inf: the largest logit is -inf, and exp(-inf - -inf) makes output and LSE NaN."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None:
            empty = (sinks == -math.inf) & (partial[1] == -math.inf)
            out, lse = out.masked_fill(empty.unsqueeze(2), math.nan), lse.masked_fill(empty, math.nan)
        return out, lse


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
