"""Wrong: each part of 512 keys adds the sink to its denominator, and so does the merge's sum of them."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        run.splits = max(1, -(-len(keys) // 512))
        return super().partial(run, r, query, keys, values, seen, first_key)

    def finish(self, run, partial, sinks):
        return super().finish(run, partial, None if sinks is None else sinks + math.log(run.splits))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
