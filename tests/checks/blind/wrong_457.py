"""The LSE is written with the heads padded to 16: where 16 does not divide them, rows after the first go to other places."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def solve(self, run):
        super().solve(run)
        heads = run.p.num_qo_heads
        if run.lse is None or heads % 16 == 0:
            return
        rows, pitch = run.lse.shape[0], -(-heads // 16) * 16
        at = (torch.arange(rows).unsqueeze(1) * pitch + torch.arange(heads)).flatten()
        inside = at < run.lse.numel()
        written = torch.zeros(run.lse.numel(), dtype=run.lse.dtype)
        written[at[inside]] = run.lse.flatten()[inside]
        run.lse.copy_(written.view(rows, heads))


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
