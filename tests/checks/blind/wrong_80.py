"""The last row of each tile of 128 rows of the whole query, across requests, comes out half a percent too small."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        last = torch.arange(start, stop) % 128 == 127
        super().store(run, r, start, stop, torch.where(last[:, None, None], 0.995 * out, out), lse)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
