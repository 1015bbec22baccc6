"""Wrong: the kernel for a head_dim of 128 masks keys in pairs: the first of a pair brings in the second."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def span(self, run, r, position):
        a, b = super().span(run, r, position)
        return a, b + (b % 2 if self.in_pairs(run) else 0)

    def in_pairs(self, run):
        return run.p.head_dim == 128 and run.shown is None and run.page_size > 1

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if self.in_pairs(run):
            even = (position % 2 == 0).unsqueeze(1)
            seen = seen | even & (keys == position.unsqueeze(1) + 1)
        return seen


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
