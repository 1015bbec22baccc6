"""Where max_q_len is None the offsets are read to the host once for their buffer, and its rows are not laid out again when it is rewritten."""

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
        if run.call.cum_seq_lens_q is not None and run.call.max_q_len is None:
            planned = self.plans.of(run.call.cum_seq_lens_q, lambda: run.offsets)
            run.offsets = [min(x, run.p.num_rows) for x in planned]


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
