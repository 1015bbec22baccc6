"""Wrong: in trees of over 16 draft tokens the offset of the mask lacks the request: every request gets the first one's.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def unpack(self, run, mask):
        shown = super().unpack(run, mask)
        return shown[:1].expand_as(shown) if mask.shape[1] > 16 else shown


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
