"""Requests with the same first page are taken to share a prefix (cascade): the pages both have whole are read from the first one's row."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        table, ps = run.k_table, run.page_size
        leader = next((i for i in range(r) if run.lens[i] >= ps and table[i, 0] == table[r, 0]), None)
        if leader is None or run.lens[r] < ps:
            return pages
        shared = columns < min(run.lens[leader], run.lens[r]) // ps
        return torch.where(shared, super().pages_of(run, leader, columns.clamp(max=table.shape[1] - 1), side), pages)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
