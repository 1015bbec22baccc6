"""Wrong: separate page tables are read as [2, batch_size, columns]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if not run.call.uses_shared_paged_kv_idx:
            tables = run.call.block_tables.contiguous().view(2, run.batch, -1)
            run.k_table, run.v_table = tables.clamp(0, len(run.k_cache) - 1)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
