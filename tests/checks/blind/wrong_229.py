"""Wrong: two pages that follow each other are loaded at once; they are taken for such where their ids differ by 1, whichever is
the larger."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        ids = super().pages_of(run, r, columns, side)
        first = int(columns[0]) % 2 if len(columns) else 0
        for i in range(first, len(ids) - 1, 2):
            if abs(int(ids[i + 1] - ids[i])) == 1:
                ids[i + 1] = min(int(ids[i]) + 1, len(run.k_cache) - 1)
        return ids


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
