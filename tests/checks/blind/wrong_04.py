"""The lengths are read to the host once for a seq_lens buffer (a plan), and not again when the buffer is rewritten."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.plans = Memory()

    def start(self, run):
        super().start(run)
        run.lens = self.plans.of(run.call.seq_lens, run.call.seq_lens.tolist)

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, run.k_cache.shape[0] - 1)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
