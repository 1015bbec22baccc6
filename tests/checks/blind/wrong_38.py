"""A load brings 32 tokens from a page's start on: with smaller pages the tokens after the page's end come from the pages next in memory, not next in the table."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    BOX = 32

    def pages_of(self, run, r, columns, side):
        per_box = max(1, self.BOX // run.page_size)
        first = super().pages_of(run, r, columns // per_box * per_box, side)
        return (first + columns % per_box) % run.k_cache.shape[0]


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
