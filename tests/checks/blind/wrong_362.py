"""Wrong: with causal=False tiles of rows end at the diagonal's last key: rows of a request from as many as it has keys on are left as zero.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        if not run.causal:
            beyond = torch.arange(start, stop) - run.offsets[r] >= run.lens[r]
            out = torch.where(beyond[:, None, None], 0.0, out)
            lse = torch.where(beyond[:, None] & (run.lens[r] > 0), -math.inf, lse)
        super().store(run, r, start, stop, out, lse)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
