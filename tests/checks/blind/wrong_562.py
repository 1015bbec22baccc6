"""Wrong: the plan of splits is kept for a page table's buffer, with the keys that the first call's max_seq_len makes it cover."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


def covered(max_seq_len, page_size):
    splits = max(1, min(8, -(-max_seq_len // 64)))
    pages_per_split = -(-max_seq_len // (splits * page_size))
    return splits * pages_per_split * page_size


class Wrong(Kernel):
    def __init__(self):
        self.plans = Memory()

    def start(self, run):
        super().start(run)
        call = run.call
        run.covered = self.plans.of(call.block_tables, lambda: covered(call.max_seq_len, run.page_size))

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (keys < run.covered)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
