"""The output is written from the start of out's allocation: a view further in gets nothing."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.out = torch.as_strided(run.out, run.out.shape, run.out.stride(), 0)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
