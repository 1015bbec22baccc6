"""Wrong: the LSE goes through the query's 16 bits before it is stored as float32."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        if run.query.dtype in (torch.float16, torch.bfloat16):
            lse = lse.to(run.query.dtype)
        super().store(run, r, start, stop, out, lse)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
