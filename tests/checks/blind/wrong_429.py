"""max_q_len=None: the grid is made for ceil(rows / requests) rows of each request; the further rows of wider ones stay zero."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def solve(self, run):
        super().solve(run)
        if run.call.cum_seq_lens_q is None or run.call.max_q_len is not None or not run.batch:
            return
        bound = -(-run.p.num_rows // run.batch)
        for first, last in zip(run.offsets, run.offsets[1:]):
            run.out[first + bound : last] = 0
            if run.lse is not None:
                run.lse[first + bound : last] = -math.inf


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
