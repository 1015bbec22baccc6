"""Wrong: tiles of 128 keys go through three stages; the last of 4, 7, 10, ... tiles finds in its stage the V of the
tile three before it.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        tiles = -(-len(keys) // 128)
        if tiles > 3 and tiles % 3 == 1:
            last = (tiles - 1) * 128
            stale = values[last - 384 : last - 384 + len(values) - last]
            values = torch.cat((values[:last], stale))
        return super().partial(run, r, query, keys, values, seen, first_key)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
