"""Where the query has batch_size * max_q_len rows, all requests are taken to have max_q_len of them; cum_seq_lens_q is not read."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        rows = run.p.max_q_len
        if rows and run.p.num_rows == run.batch * rows:
            run.offsets = list(range(0, run.p.num_rows + 1, rows))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
