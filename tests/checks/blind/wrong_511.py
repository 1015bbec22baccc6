"""A row tile finds its request as the first one whose offset is the tile's: after a request without rows it takes that one's keys."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def request(self, run, r):
        run.owner = run.offsets.index(run.offsets[r])
        own, run.lens = run.lens, list(run.lens)
        run.lens[r] = own[run.owner]
        super().request(run, r)
        run.lens = own

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, run.owner, columns, side)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
