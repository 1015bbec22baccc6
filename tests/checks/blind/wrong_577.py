"""Wrong: without max_q_len, requests of different widths are given the mean number of rows, rounded up, and rows beyond it are zero."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def request(self, run, r):
        call = run.call
        first, last = run.offsets[r : r + 2]
        if call.cum_seq_lens_q is None or call.max_q_len is not None or first == last:
            return super().request(run, r)
        end = min(last, first + -(-run.p.num_rows // run.batch))
        self.rows(run, r, first, end)
        run.out[end:last] = 0
        if run.lse is not None:
            run.lse[end:last] = -math.inf


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
