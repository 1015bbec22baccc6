"""Wrong: products of float16 queries and keys are held in float16 before bmm1_scale makes them small: beyond 65,504
they are infinite.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def scores(self, run, r, query, keys, seen, first_key):
        s = super().scores(run, r, query, keys, seen, first_key)
        if run.p.query.dtype != torch.float16 or run.scale1 == 0:
            return s
        return torch.where((s / run.scale1).abs() > 65504, s.sign() * math.inf, s)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
