"""The last request's rows end at the query's last row, not at the last offset: padding rows shift its rows' positions."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.call.cum_seq_lens_q is not None and run.batch:
            run.offsets = [*run.offsets[:-1], run.p.num_rows]


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
