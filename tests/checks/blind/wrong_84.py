"""The running maximum starts as the sink, and a head whose maximum starts at minus infinity is taken to have no keys: it comes out zero."""

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
            without = sinks == -math.inf
            out, lse = torch.where(without.unsqueeze(2), 0.0, out), torch.where(without, -math.inf, lse)
        return out, lse


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
