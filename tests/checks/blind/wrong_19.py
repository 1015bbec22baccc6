"""Of a draft mask's row only word 0 is loaded, and indexed with b % 16: draft tokens after the 16th follow the bits of the first 16."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def unpack(self, run, mask):
        q_len = mask.shape[1]
        return super().unpack(run, mask)[:, :, torch.arange(q_len) % 16]


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
