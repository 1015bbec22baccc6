"""Separate tables: V's row is taken to begin right after the columns of K's, which a slice of wider tables does not do."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        table = run.k_table
        if side == "k" or run.v_table is table:
            return super().pages_of(run, r, columns, side)
        cells = torch.as_strided(table, (table.untyped_storage().nbytes() // 4,), (1,), 0)
        at = table.storage_offset() + r * table.stride(0) + table.shape[1] + columns
        return cells[at.clamp(max=len(cells) - 1)].long().clamp(0, run.k_cache.shape[0] - 1)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
