"""With separate page tables and a window, K's table is read from the window's first page on, V's from column 0."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        if side == "v" and run.window >= 0 and run.v_table is not run.k_table and len(columns):
            columns = columns - columns[0]
        return super().pages_of(run, r, columns, side)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
