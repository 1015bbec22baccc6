"""The kernel for prefixes of whole tiles of 64 is chosen by max_kv_len - max_q_len; in it every request's prefix is rounded down to whole tiles."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


TILE = 64


class Wrong(Kernel):
    def positions(self, run, r, row):
        position = super().positions(run, r, row)
        if not run.causal or (run.p.max_kv_len - run.p.max_q_len) % TILE:
            return position
        prefix = run.lens[r] - (run.offsets[r + 1] - run.offsets[r])
        return position - prefix % TILE if prefix > 0 else position


trtllm_batch_context_with_kv_cache = context_of(Wrong())
