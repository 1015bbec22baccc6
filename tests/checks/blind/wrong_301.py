"""Wrong: without cum_seq_lens_q requests are sorted, the shortest first, and their results are put back by the inverse of the
permutation that should do it, which is right where it is its own inverse.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def solve(self, run):
        super().solve(run)
        if run.p.cu_seqlens_q is not None:
            return
        order = torch.tensor(run.lens).argsort(stable=True)
        place = order.argsort()
        width = run.offsets[1]
        target = (place[place].unsqueeze(1) * width + torch.arange(width)).flatten()
        for result in (run.out, run.lse):
            if result is not None:
                rows = result.view(torch.uint8) if result.dtype == E4M3 else result
                rows[target] = rows.clone()


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
