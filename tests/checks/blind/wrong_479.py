"""The draft mask's words are loaded as uint32 pairs from its address rounded down: one that begins at an odd word is read a word early."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def unpack(self, run, mask):
        if mask.data_ptr() % 4:
            mask = assuming_strides(mask, mask.stride(), mask.storage_offset() - 1)
        return super().unpack(run, mask)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
