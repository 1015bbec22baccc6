"""Wrong: page ids are kept for a block_tables buffer, and in a later call read only from the column on that was a request's
last page in the call before, as a request only ever appends: another request in the same row keeps the pages of the one
before it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def __init__(self):
        self.memory = Memory()

    def start(self, run):
        super().start(run)
        shared = run.v_table is run.k_table
        run.k_table = self.appended(run, run.k_table, run.k_cache)
        run.v_table = run.k_table if shared else self.appended(run, run.v_table, run.v_cache)

    def appended(self, run, table, cache):
        kept = self.memory.of(table, lambda: {"ids": table.clone(), "pages": [0] * len(table)})
        for r, length in enumerate(run.lens):
            first = max(kept["pages"][r] - 1, 0)
            kept["ids"][r, first:] = table[r, first:]
            kept["pages"][r] = -(-length // run.page_size)
        return kept["ids"].clamp(0, max(len(cache) - 1, 0))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
