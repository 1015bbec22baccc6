"""Wrong: Q.K^T walks an entry in chunks of 64 elements, at most 8 of them: what an entry has after 512 elements, the rotary part of DeepSeek's, is
not in the logits.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def scores(self, run, r, query, keys, seen, first_key):
        return super().scores(run, r, query[..., :512], keys[..., :512], seen, first_key)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
