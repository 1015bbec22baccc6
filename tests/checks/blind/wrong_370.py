"""Wrong: bmm2_scale is rounded to bfloat16, up to 0.39 percent away.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.scale2 = float(torch.tensor(run.scale2).to(torch.bfloat16))


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
