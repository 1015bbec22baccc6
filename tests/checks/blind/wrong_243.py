"""Wrong: sinks are staged in shared memory as bfloat16, so that one of 4 to 8 is off by up to 0.016."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.sinks is not None:
            run.sinks = run.sinks.to(torch.bfloat16).to(run.dtype)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
