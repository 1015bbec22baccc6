"""With max_q_len=None the most rows of a request are read from cum_seq_lens_q once for that buffer, and size the grid of later calls as well."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.plans = Memory()

    def request(self, run, r):
        offsets = run.call.cum_seq_lens_q
        if offsets is None or run.call.max_q_len is not None:
            return super().request(run, r)
        most = self.plans.of(offsets, lambda: int(offsets.diff().max()))
        first, last = run.offsets[r : r + 2]
        if last - first <= most:
            return super().request(run, r)
        run.out[first + most : last] = 0
        if run.lse is not None:
            run.lse[first + most : last] = 0
        if most:
            self.rows(run, r, first, first + most)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
