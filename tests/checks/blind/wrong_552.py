"""The host's row counts are read as int32 whatever their dtype: of int64 ones every second number is 0, and such a request is skipped as empty."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def request(self, run, r):
        mirror = run.call.q_seq_lens_cpu
        if mirror is not None and int(mirror.view(torch.int32)[r]) == 0:
            first, last = run.offsets[r : r + 2]
            run.out[first:last] = 0
            if run.lse is not None:
                run.lse[first:last] = -math.inf
            return
        super().request(run, r)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
