"""Page ids are loaded four at a time if the table's rows are multiples of four apart; its first address is rounded down to 16 bytes then."""

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
        beyond = table.data_ptr() % 16 // 4
        if beyond and table.stride(0) % 4 == 0:
            run.k_table = run.v_table = assuming_strides(table, table.stride(), table.storage_offset() - beyond)

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, run.k_cache.shape[0] - 1)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
