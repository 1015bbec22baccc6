"""With page tables of K and of V apart, the ids of V's pages after the first 128 tokens are prefetched from K's table."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


PREFETCHED = 128  # tokens of a tile


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        if side == "v" and run.k_table is not run.v_table:
            later = columns * run.page_size >= PREFETCHED
            pages = torch.where(later, run.k_table[r, columns].long(), pages)
        return pages


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
