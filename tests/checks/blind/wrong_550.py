"""Rows are taken to be uniform if the query has batch_size * max_q_len of them, also where the last are padding after ragged requests."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        p = run.p
        if p.cu_seqlens_q is not None and p.num_rows == run.batch * p.max_q_len:
            run.offsets = list(range(0, p.num_rows + 1, p.max_q_len)) if p.max_q_len else run.offsets


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
