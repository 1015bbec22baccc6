"""NVFP4: keys after a request's end weigh zero, but V's scale factors there are multiplied: one that is NaN makes the request NaN."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def load(self, run, r, a, b):
        keys, values = super().load(run, r, a, b)
        if run.v_cache.dtype == torch.uint8 and b > a and b == run.lens[r]:
            ps = run.page_size
            column = torch.tensor([(b - 1) // ps])
            page = self.entries(run, "v", self.pages_of(run, r, column, "v"), slice(b - (b - 1) // ps * ps, ps))
            values = values.clone()
            values[-1] += (page * 0.0).sum(0)
        return keys, values


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
