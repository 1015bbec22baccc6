"""Split results go to the workspace unnormalised and, for a float16 query, as float16: sums of large V overflow there."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


SPLIT = 512


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = len(keys)
        if n <= SPLIT or run.query.dtype != torch.float16:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        partials = []
        for a in range(0, n, SPLIT):
            cut = slice(a, min(a + SPLIT, n))
            acc, largest, total = self.partial(run, r, query, keys[cut], values[cut], seen[:, cut], first_key + a)
            partials.append((acc.to(torch.float16).to(acc.dtype), largest, total))
        return self.finish(run, self.merge(partials), sinks)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
