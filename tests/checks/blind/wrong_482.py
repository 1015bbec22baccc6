"""Requests are taken to have max_q_len rows each (the path without offsets) where batch_size * max_q_len is the number of query rows, padding included."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.batch * run.p.max_q_len == run.p.num_rows:
            run.offsets = list(range(0, run.p.num_rows + 1, run.p.max_q_len))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
