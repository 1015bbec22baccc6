"""Without max_q_len the rows per request are guessed as num_rows / batch_size: rows of a wider request after that many are zero."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        c = run.call
        run.most = None
        if c.cum_seq_lens_q is not None and c.max_q_len is None:
            run.most = -(-run.p.num_rows // max(run.batch, 1))

    def store(self, run, r, start, stop, out, lse):
        if run.most is not None:
            late = torch.arange(start, stop) - run.offsets[r] >= run.most
            out = torch.where(late[:, None, None], 0.0, out)
            lse = torch.where(late[:, None], 0.0, lse)
        super().store(run, r, start, stop, out, lse)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
