"""Wrong: for a batch of one request max_seq_len is taken for its length, which saves a load."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.batch == 1 and run.lens[0]:
            run.lens[0] = min(run.p.max_kv_len, run.k_table.shape[1] * run.page_size)

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, len(run.k_cache) - 1)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
