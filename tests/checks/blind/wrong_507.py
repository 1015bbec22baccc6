"""Of a float16 query the sum of weights times V goes through float16 before it is divided by the sum of weights: it saturates at 65504."""

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
            acc = acc.clamp(-65504.0, 65504.0)
        return acc, largest, total


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
