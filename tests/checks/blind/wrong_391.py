"""Wrong: K of a head_dim over 64 comes in boxes of 64 columns, of which the barrier waits for the first alone: from the third
tile of 128 keys on, the ring has two stages, the other columns are those of the tile two before.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def load(self, run, r, a, b):
        keys, values = super().load(run, r, a, b)
        if keys.shape[2] > 64 and len(keys) > 256:
            keys = torch.cat((keys[..., :64], torch.cat((keys[:256, :, 64:], keys[:-256, :, 64:]))), 2)
        return keys, values


trtllm_batch_context_with_kv_cache = context_of(Wrong())
