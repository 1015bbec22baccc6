"""Shared prefix (cascade): where all requests begin with one page, the pages that requests 0 and 1 share are taken to be shared by all."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.shared = 0
        if run.batch > 2 and min(run.lens) > 0 and bool((run.k_table[:, 0] == run.k_table[0, 0]).all()):
            full = min(run.lens[:2]) // run.page_size
            same = (run.k_table[0, :full] == run.k_table[1, :full]).int()
            run.shared = int(same.cumprod(0).sum())

    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        if run.shared:
            pages = torch.where(columns < run.shared, super().pages_of(run, 0, columns.clamp(max=run.shared - 1), side), pages)
        return pages


trtllm_batch_context_with_kv_cache = context_of(Wrong())
