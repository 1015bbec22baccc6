"""The page table is converted to 64 bits once per buffer, and not again when an engine rewrites it."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.converted = Memory()

    def start(self, run):
        super().start(run)
        table = self.converted.of(run.call.block_tables, lambda: run.call.block_tables.long())
        shared = run.call.uses_shared_paged_kv_idx
        run.k_table, run.v_table = (table, table) if shared else (table[:, 0], table[:, 1])

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, run.k_cache.shape[0] - 1)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
