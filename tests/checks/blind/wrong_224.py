"""Wrong: the scratch for parts of 512 keys has four places per row: K/V heads 4 apart write to the same one."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        results = super().partial(run, r, query, keys, values, seen, first_key)
        if len(keys) <= 512:
            return results
        n = run.num_kv_heads
        writer = torch.tensor([max(range(h % 4, n, 4)) for h in range(n)])
        return tuple(x.unflatten(1, (n, -1))[:, writer].flatten(1, 2) for x in results)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
