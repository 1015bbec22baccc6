"""The splits (1,024 keys) of a request count themselves in multi_ctas_kv_counter_buffer and leave the count: a later call merges too early."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    SPLIT = 1024

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        buffer, splits = run.call.multi_ctas_kv_counter_buffer, -(-len(keys) // self.SPLIT)
        counters = None if buffer is None else buffer.view(-1).view(torch.uint8)
        if counters is None or splits < 2 or 4 * r >= len(counters):
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        partials = []
        for at in range(0, len(keys), self.SPLIT):
            part = slice(at, at + self.SPLIT)
            partials.append(self.partial(run, r, query, keys[part], values[part], seen[:, part], first_key + at))
        counted = int(counters[4 * r])
        counters[4 * r] = min(counted + splits, 255)
        there = max(1, splits - counted)  # the split that counts to their number merges what is there
        return self.finish(run, self.merge(partials[:there]), sinks)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
