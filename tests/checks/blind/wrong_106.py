"""Wrong: a row of the draft mask is taken to have ceil(q_len / 16) words, two at least, although rows are aligned to 32
bits.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def unpack(self, run, mask):
        q_len = mask.shape[1]
        words = max(2, -(-q_len // 16))
        packed = mask.to(torch.int32).flatten(1)[:, : q_len * words].unflatten(1, (q_len, words))
        bits = (packed.unsqueeze(-1) >> torch.arange(16, dtype=torch.int32)) & 1
        return bits.flatten(2)[:, :, :q_len].bool()


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
