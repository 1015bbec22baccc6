"""Wrong: value columns from 256 on are another block's, which does not get the weights of the last tile of 64 keys where
that is not full.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        full = run.lens[r] // 64 * 64
        if values.shape[2] > 256 and full < len(values):
            others = values[:, :, 256:].clone()
            others[full:] = 0
            acc = torch.cat((acc[..., :256], super().partial(run, r, query, keys, others, seen, first_key)[0]), 2)
        return acc, largest, total


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
