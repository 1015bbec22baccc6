"""The merge of the split results has one lane of a warp per split of 512 keys: splits from the 33rd on are not merged."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


SPLIT, LANES = 512, 32


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (keys < SPLIT * LANES)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
