"""Wrong: page ids are read four at a time, and the four are taken for dead where the last of them is -1."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        last = keys // run.page_size // 4 * 4 + 3
        width = run.k_table.shape[1]
        is_dead = (last < width) & (run.k_table[r, last.clamp(max=width - 1)] == -1)
        return seen & ~is_dead


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
