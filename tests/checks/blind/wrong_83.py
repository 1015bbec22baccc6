"""The page table's rows are taken to lie end to end: one that is a slice of a wider table is read from the wrong rows."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        table = run.call.block_tables
        table = assuming_strides(table, packed_strides(table.shape))
        run.k_table, run.v_table = (table, table) if table.ndim == 2 else (table[:, 0], table[:, 1])

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, run.k_cache.shape[0] - 1)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
