"""128 page ids of a request are staged at a time, and not staged again: page 128 and later are read as page c % 128."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns % 128, side)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
