"""Wrong: a new output has the query's dtype, not bfloat16."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def mla(self, call):
        result = super().mla(call)
        if call.out is not None or call.query.dtype not in (torch.float16, E4M3):
            return result
        out, *lse = result if call.return_lse else (result,)
        out = saturated(out.float(), call.query.dtype)
        return (out, *lse) if lse else out


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
