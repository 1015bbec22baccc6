"""The search for a row's request ends at the first equal offset: the first row after requests without rows is answered from the first of these."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def request(self, run, r):
        super().request(run, r)
        first = run.offsets[r]
        found = run.offsets.index(first)
        if found != r and run.offsets[r + 1] > first:
            self.rows(run, found, first, first + 1)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
