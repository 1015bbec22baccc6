"""Wrong: masked logits are -1e30, not minus infinity: a row that sees no key gives the mean of all."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def mask_scores(self, run, r, s, first_key):
        return s.clamp(min=-1e30)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
