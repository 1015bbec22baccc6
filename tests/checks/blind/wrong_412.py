"""The mask's words are loaded as signed 16 bits and joined in pairs: a row that sees draft token 15 sees tokens 16 to 31 too."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def unpack(self, run, mask):
        words = mask.to(torch.int64)
        low, high = words[..., 0::2], words[..., 1::2]
        low = torch.where(low >= 2**15, low - 2**16, low)
        joined = low | (high << 16)
        bits = (joined.unsqueeze(-1) >> torch.arange(32)) & 1
        return bits.flatten(2)[:, :, : mask.shape[1]].bool()


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
