"""The LSE is written with the buffer's row stride and heads side by side: a buffer [heads, rows], transposed, is written to the wrong places."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def store(self, run, r, start, stop, out, lse):
        if run.lse is not None:
            run.lse = assuming_strides(run.lse, (run.lse.stride(0), 1))
        super().store(run, r, start, stop, out, lse)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
