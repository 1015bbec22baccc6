"""With a float16 query the unnormalised P.V is kept in float16: sums beyond 65,504 become infinite."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        if run.p.query.dtype == torch.float16:
            acc = torch.where(acc.abs() > 65504, torch.sign(acc) * math.inf, acc)
        return acc, largest, total


trtllm_batch_context_with_kv_cache = context_of(Wrong())
