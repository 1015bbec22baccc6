"""The split reduction has 1,024 arrival counters, one per request and K/V head: for later pairs the last split (256 keys) is not waited for."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    COUNTERS, SPLIT = 1024, 256

    def mask_scores(self, run, r, s, first_key):
        n = s.shape[3]
        if n > self.SPLIT:
            counted = max(0, self.COUNTERS - r * run.num_kv_heads)
            s[counted:, :, :, (n - 1) // self.SPLIT * self.SPLIT :] = -math.inf
        return s


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
