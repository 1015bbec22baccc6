"""The keys of max_seq_len are divided among up to 8 splits, one per 512 keys, and a split's share is rounded down to whole pages: the rest is in none."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


SPLIT, MOST = 512, 8


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        splits = min(MOST, -(-run.p.max_kv_len // SPLIT))
        if splits <= 1:
            return seen
        share = run.p.max_kv_len // splits // run.page_size * run.page_size
        return seen & (keys < splits * share)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
