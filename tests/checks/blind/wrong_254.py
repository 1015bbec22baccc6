"""Wrong: for a head_dim of 192 the key's columns from 128 on, which are DeepSeek's rotary part and the same for all heads, are
read of head 0 alone.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def load(self, run, r, a, b):
        keys, values = super().load(run, r, a, b)
        if keys.shape[2] == 192:
            keys = torch.cat((keys[..., :128], keys[:, :1, 128:].expand(-1, keys.shape[1], -1)), 2)
        return keys, values


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
