"""Wrong: of groups of 4 heads and more the last head shares its tile with padding, whose weights count a little in its
denominator: it comes out half a percent too small.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        last = torch.arange(out.shape[1]) % run.group == run.group - 1
        biased = last & (run.group >= 4)
        return out * torch.where(biased, 0.995, 1.0).to(out.dtype)[:, None], lse


trtllm_batch_context_with_kv_cache = context_of(Wrong())
