"""Wrong: in pages of 32 tokens and more page ids are loaded four at a time from an address that is rounded down: a row of the table that
does not begin at a multiple of four cells is read shifted, from the end of the row before it.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        table = run.k_table if side == "k" else run.v_table
        shift = (table.data_ptr() // 4 + r * table.stride(0)) % 4
        if run.page_size < 32 or not shift or not len(columns):
            return super().pages_of(run, r, columns, side)
        cells = torch.as_strided(table, (table.untyped_storage().nbytes() // 4,), (1,), 0)
        at = table.storage_offset() + r * table.stride(0) + columns - shift
        return cells[at.clamp(min=0)].long().clamp(0, len(run.k_cache) - 1)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
