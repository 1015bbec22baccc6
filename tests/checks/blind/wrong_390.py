"""Wrong: a block has two tiles of 64 rows, and the causal mask of the second one is that of the first: its rows are masked as
if they were 64 earlier.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        if run.causal:
            position = position - 64 * (row % 128 >= 64).long()
        return super().visible(run, r, row, position, keys)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
