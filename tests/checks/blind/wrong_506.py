"""Eight splits are planned for the longest length of a seq_lens buffer's first call, in multiples of 64 keys: keys beyond them in a later call, whose lengths have grown, are lost."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.plans = Memory()

    def start(self, run):
        super().start(run)
        run.split = self.plans.of(run.call.seq_lens, lambda: max(1, -(-max(run.lens) // (8 * 64))) * 64)

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (keys < 8 * run.split)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
