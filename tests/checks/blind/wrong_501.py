"""Split-K has room for 16 splits of 512 keys: keys from the 8192nd a row may see on are in no split."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return seen & (keys - keys[0] < 16 * 512) if len(keys) else seen


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
