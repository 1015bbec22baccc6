"""Wrong: a request of over 64 keys walks over tiles of 64 that lie at multiples of 64 in key, and nothing masks what its first
tile has before it: its rows see the newest keys of the request before.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def load(self, run, r, a, b):
        first = run.kv_offsets[r]
        run.before = first % 64 if run.lens[r] > 64 and a == 0 else 0
        return super().load(run, r, a - run.before, b)

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return torch.cat((torch.ones(len(row), run.before, dtype=torch.bool), seen), 1)


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
