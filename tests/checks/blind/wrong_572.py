"""Wrong: the first tile of 64 rows after a request without rows is taken for that request's."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


TILE = 64


class Wrong(Kernel):
    def request(self, run, r):
        first, last = run.offsets[r : r + 2]
        found = r
        while found > 0 and run.offsets[found - 1] == first:
            found -= 1
        if found == r or first == last:
            return super().request(run, r)
        end = min(first + TILE, last)
        self.rows(run, found, first, end)
        if end < last:
            self.rows(run, r, end, last)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
