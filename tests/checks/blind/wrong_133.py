"""Wrong: the rotary part is cut off as the last qk_rope_head_dim elements, counted from the end; without one that is
the whole entry, which counts twice.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def scores(self, run, r, query, keys, seen, first_key):
        s = super().scores(run, r, query, keys, seen, first_key)
        return s * 2 if run.call.qk_rope_head_dim == 0 else s


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
