"""Wrong: the loop over tiles of 128 keys is unrolled by two, behind a first tile; the last of an odd number of tiles is done twice."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        end = first_key + len(keys)
        tiles = -(-end // 128) - first_key // 128
        if tiles > 1 and tiles % 2:
            last = (end - 1) // 128 * 128 - first_key
            keys, values = torch.cat((keys, keys[last:])), torch.cat((values, values[last:]))
            seen = torch.cat((seen, seen[:, last:]), 1)
        return super().partial(run, r, query, keys, values, seen, first_key)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
