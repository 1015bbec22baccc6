"""Wrong: of a given lse the stride of rows is taken, but its heads to lie side by side: where they do not, as in a transposed one, values go to the
wrong places.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def solve(self, run):
        lse = run.lse
        super().solve(run)
        if run.p.lse is None or lse.shape[1] == 1 or lse.stride(1) == 1:
            return
        values = lse.clone(memory_format=torch.contiguous_format)
        lse.zero_()
        assuming_strides(lse, (lse.stride(0), 1)).copy_(values)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
