"""A request without keys returns early, with an LSE of minus infinity: its sinks are forgotten."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def request(self, run, r):
        if run.lens[r]:
            super().request(run, r)
            return
        rows = slice(*run.offsets[r : r + 2])
        run.out[rows] = 0
        if run.lse is not None:
            run.lse[rows] = -math.inf


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
