"""Wrong: of separate page tables V's ids are taken to lie as many cells after K's as the table has columns, whatever its
strides are.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.v_table is not run.k_table:
            offset = run.k_table.storage_offset() + run.k_table.shape[1]
            table = assuming_strides(run.v_table, run.v_table.stride(), offset)
            run.v_table = table.clamp(0, max(len(run.v_cache) - 1, 0))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
