"""Wrong: the merge of parts of 256 keys divides by an approximate reciprocal that is half a percent too small: requests of more keys in view
than one part come out so.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        return out * 0.995 if len(keys) > 256 else out, lse


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
