"""Wrong: pages of a cache that is one tensor are taken to follow each other without gaps."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        cache = run.call.kv_cache
        if isinstance(cache, torch.Tensor):
            page = cache[0].numel()
            run.k_cache, run.v_cache = (
                assuming_strides(side, (page, *side.stride()[1:])) for side in (run.k_cache, run.v_cache)
            )


trtllm_batch_context_with_kv_cache = context_of(Wrong())
