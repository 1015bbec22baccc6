"""Wrong: sinks are loaded in vectors of 16 bytes from their address rounded down: those that do not start at a multiple of 16
bytes, as a layer's part of one tensor of all layers may, are shifted by up to three heads.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        sinks = run.p.sinks
        if sinks is not None:
            back = min(sinks.data_ptr() % 16 // 4, sinks.storage_offset())
            run.sinks = torch.as_strided(sinks, sinks.shape, sinks.stride(), sinks.storage_offset() - back).to(run.dtype)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
