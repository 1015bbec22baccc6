"""Wrong: a page that is that of the column before is not loaded again, nor are its keys multiplied again: the column counts for
nothing.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if not len(keys):
            return seen
        column = keys // run.page_size
        table = run.k_table[r].long()
        again = (column > 0) & (table[column] == table[(column - 1).clamp(min=0)])
        return seen & ~again


trtllm_batch_context_with_kv_cache = context_of(Wrong())
