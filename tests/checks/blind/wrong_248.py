"""Wrong: two CTAs of a cluster take two requests and walk over tiles of 128 keys together; they end where the first request
does, and a longer second one loses its later keys.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return seen & (keys < -(-run.lens[r - 1] // 128) * 128) if r % 2 else seen


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
