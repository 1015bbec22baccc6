"""Wrong: of scale factors that are one tensor, V's are taken from its first part, K's."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if isinstance(run.call.kv_cache_sf, torch.Tensor):
            run.v_factors = run.p.k_scale_factors
            if run.p.v_scale_factors_interleaved:
                run.v_factors = deinterleave_v_scale_factors(run.v_factors.view(torch.uint8)).view(E4M3)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
