"""Wrong: rows of a request go in launches of 256, each of which takes its last row for the request's newest token."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def positions(self, run, r, row):
        num_rows = run.offsets[r + 1] - run.offsets[r]
        end = (row // 256 * 256 + 256).clamp(max=num_rows)
        return run.lens[r] - end + row


trtllm_batch_context_with_kv_cache = context_of(Wrong())
