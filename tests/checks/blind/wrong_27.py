"""The request of a row is the first whose offset is the row's (bisect_left): a request without rows before it is taken instead."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.found = [run.offsets.index(offset) for offset in run.offsets[:-1]]
        lens = run.lens
        run.lens = [lens[found] for found in run.found]

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, run.found[r], columns, side)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
