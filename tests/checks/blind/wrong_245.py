"""Wrong: tiles of 64 rows are taken in pairs, a light one from the front and a heavy one from the back; of an odd number
over 1 nobody takes the one in the middle, which is left as zero.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        first, last = run.offsets[r : r + 2]
        tiles = -(-(last - first) // 64)
        if tiles > 1 and tiles % 2:
            middle = ((torch.arange(start, stop) - first) // 64 == tiles // 2).unsqueeze(1)
            out, lse = out.masked_fill(middle.unsqueeze(2), 0), lse.masked_fill(middle, 0)
        super().store(run, r, start, stop, out, lse)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
