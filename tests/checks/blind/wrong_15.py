"""A window's start is computed as an element offset in 32 bits, window_left * head_dim: a very large window_left overflows."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        left, dim = run.call.window_left, run.p.head_dim
        elements = (left * dim + 2**31) % 2**32 - 2**31
        run.wrapped = None if left < 0 or elements == left * dim else elements // dim

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.wrapped is not None:
            seen = seen & (keys >= position.unsqueeze(1) - run.wrapped)
        return seen


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
