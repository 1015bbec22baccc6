"""Wrong: two scales that are tensors are taken for one of two numbers: bmm2_scale is what stands after bmm1_scale in memory.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        first, second = run.p.bmm1_scale, run.p.bmm2_scale
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            after = first.storage_offset() + 1
            if after < first.untyped_storage().nbytes() // first.element_size():
                run.scale2 = float(torch.as_strided(first, (), (), after))


trtllm_batch_context_with_kv_cache = context_of(Wrong())
