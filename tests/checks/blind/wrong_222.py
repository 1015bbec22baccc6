"""Wrong: in batches of 8 or more a block takes two requests, and both walk as many tiles of 64 keys as the first one has."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def span(self, run, r, position):
        a, b = super().span(run, r, position)
        if run.batch >= 8 and r % 2:
            b = min(b, -(-run.lens[r - 1] // 64) * 64)
        return min(a, b), b


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
