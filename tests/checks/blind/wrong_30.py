"""The last request of a batch comes out half a percent too large (its normaliser counts the tile's padding wrongly)."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        if r == run.batch - 1:
            out = out * 1.005
        super().store(run, r, start, stop, out, lse)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
