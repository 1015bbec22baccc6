"""Wrong: an lse of three dimensions is written as [batch_size, heads, rows]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def mla(self, call):
        result = super().mla(call)
        if call.lse is not None and call.lse.ndim == 3:
            call.lse.copy_(call.lse.transpose(1, 2).reshape(call.lse.shape))
        return result


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
