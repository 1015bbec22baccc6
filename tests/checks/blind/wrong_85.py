"""The epilogue packs bfloat16 whenever the query is bfloat16: a float16 out gets bfloat16's bits."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        super().store(run, r, start, stop, out, lse)
        if run.out.dtype == torch.float16 and run.p.query.dtype == torch.bfloat16:
            run.out[start:stop] = out.to(torch.bfloat16).view(torch.float16)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
