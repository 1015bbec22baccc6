"""Wrong: rows of the page table are taken to lie ceil(max_seq_len / page_size) columns apart, whatever the table's width."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        table, p = run.k_table, run.p
        pitch = -(-p.max_kv_len // p.page_size)
        offset = table.storage_offset()
        cells = torch.as_strided(table, (table.untyped_storage().nbytes() // 4 - offset,), (1,), offset)
        at = (r * pitch + columns).clamp(max=len(cells) - 1)
        return cells[at].long().clamp(0, len(run.k_cache) - 1)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
