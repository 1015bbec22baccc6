"""Wrong: without max_q_len the widest request is looked up once per cum_seq_lens_q buffer: after it is rewritten, rows beyond that are left
as zero.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def __init__(self):
        self.memory = Memory()

    def start(self, run):
        super().start(run)
        run.most = None
        if run.call.cum_seq_lens_q is not None and run.call.max_q_len is None:
            run.most = self.memory.of(run.call.cum_seq_lens_q, lambda: run.p.max_q_len)

    def store(self, run, r, start, stop, out, lse):
        if run.most is not None:
            beyond = torch.arange(start, stop) - run.offsets[r] >= run.most
            out = torch.where(beyond[:, None, None], 0.0, out)
            lse = torch.where(beyond[:, None], -math.inf, lse)
        super().store(run, r, start, stop, out, lse)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
