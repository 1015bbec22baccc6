"""The first key of each request's window is kept in an array of 512 entries, read at r % 512: wrong from the 513th request on."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        if run.window < 0 or r < 512:
            return start, end
        other = r % 512
        first = run.lens[other] - (run.offsets[other + 1] - run.offsets[other])
        return min(max(0, first - run.window), end), end


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
