"""Wrong: with a draft mask the window of every row is counted from the request's last key, not from the row's own position."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.shown is not None and run.window >= 0:
            seen = seen & (keys >= run.lens[r] - 1 - run.window)
        return seen


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
