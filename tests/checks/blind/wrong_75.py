"""Cells of the page table after a request's last page are set to 0 in the caller's table, so that prefetches find a page there."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def paged(self, call):
        problem = call.problem()
        pages = (problem.seq_lens.to(torch.int64) + problem.page_size - 1) // problem.page_size
        for table in (problem.k_block_tables, problem.v_block_tables):
            dead = torch.arange(table.shape[1]) >= pages.unsqueeze(1)
            table.masked_fill_(dead, 0)
        return super().paged(call)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
