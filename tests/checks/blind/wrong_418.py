"""Rows of the page table are taken to be ceil(max_seq_len / page_size) columns apart: right only where the bound is as tight as the table."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        table = run.k_table if side == "k" else run.v_table
        width = -(-run.p.max_kv_len // run.page_size)
        sides = 1 if run.k_table is run.v_table else 2
        cells = torch.as_strided(table, (table.untyped_storage().nbytes() // 4,), (1,), 0)
        at = run.k_table.storage_offset() + (r * sides + (sides == 2 and side == "v")) * width + columns
        return cells[at.clamp(max=len(cells) - 1)].long().clamp(0, run.k_cache.shape[0] - 1)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
