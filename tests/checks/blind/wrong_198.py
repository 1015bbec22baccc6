"""Wrong: with lengths on the host the grid has as many tiles of 64 rows as the longest request's keys need; rows after them
are left as zero.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        host = run.call.host_lengths()
        if host is not None and max(host[1], default=0):
            late = torch.arange(start, stop) - run.offsets[r] >= 64 * -(-max(host[1]) // 64)
            out, lse = out.masked_fill(late[:, None, None], 0), lse.masked_fill(late.unsqueeze(1), 0)
        super().store(run, r, start, stop, out, lse)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
