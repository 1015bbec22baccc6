"""With causal=False the LSE is still that of the causal scores."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if not run.causal and run.lse is not None:
            seen = seen & (first_key + torch.arange(len(keys)) <= position.unsqueeze(1))
            _, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        return out, lse


trtllm_batch_context_with_kv_cache = context_of(Wrong())
