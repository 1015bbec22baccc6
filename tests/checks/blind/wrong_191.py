"""Wrong: the number of splits of 256 keys is set at the first call of a batch size, rows and heads, by its max_seq_len; a
later call's keys after the last split are not read.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    splits = {}

    def start(self, run):
        super().start(run)
        p = run.p
        shape = p.batch_size, p.num_rows, p.num_qo_heads
        run.room = 256 * self.splits.setdefault(shape, max(1, -(-p.max_kv_len // 256)))

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return start, min(end, run.room)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
