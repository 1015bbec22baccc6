"""The sink enters with key tile 0 (64 keys): a row whose window starts after that tile never gets it."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def sink_rows(self, run, r, position):
        sinks = super().sink_rows(run, r, position)
        if sinks is not None and run.window >= 0:
            sinks = torch.where((position - run.window >= 64).unsqueeze(1), -math.inf, sinks)
        return sinks


trtllm_batch_context_with_kv_cache = context_of(Wrong())
