"""Wrong: parts of 512 keys are merged, but the LSE is stored by the last part, of its own keys."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        if len(keys) > 512:
            n = (len(keys) - 1) // 512 * 512
            last = self.partial(run, r, query, keys[n:], values[n:], seen[:, n:], first_key + n)
            lse = self.finish(run, last, sinks)[1]
        return out, lse


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
