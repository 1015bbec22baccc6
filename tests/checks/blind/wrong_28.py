"""V is read with K's strides: a V that lies otherwise in memory is read from the wrong places."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.v_cache = assuming_strides(run.v_cache, run.k_cache.stride())


trtllm_batch_context_with_kv_cache = context_of(Wrong())
