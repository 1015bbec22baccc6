"""Requests without keys are skipped by the scheduler: their rows of out and lse keep what was there."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def request(self, run, r):
        if run.lens[r]:
            super().request(run, r)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
