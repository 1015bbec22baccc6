"""Without max_q_len the grid has as many rows per request as the query has on average, rounded up: longer requests lose their last rows."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        c = run.call
        if c.cum_seq_lens_q is not None and c.max_q_len is None:
            made = run.offsets[r] + -(-run.p.num_rows // run.batch)
            if made < stop:
                out[max(made - start, 0) :] = 0.0
                lse[max(made - start, 0) :] = -math.inf
        super().store(run, r, start, stop, out, lse)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
