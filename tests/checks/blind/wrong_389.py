"""Wrong: V's NVFP4 scale factors are read as interleaved over four tokens, as trtllm-gen has them, also where the XQA path has
them in plain order.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        factors = run.p.v_scale_factors
        if factors is not None and not run.p.v_scale_factors_interleaved and run.page_size % 4 == 0:
            run.v_factors = deinterleave_v_scale_factors(factors.contiguous().view(torch.uint8)).view(E4M3)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
