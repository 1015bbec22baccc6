"""64 splits of 256 keys are launched for a request, whatever its length: keys after the 64th split are not read."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    SPLIT, MOST = 256, 64

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = self.SPLIT * self.MOST
        return super().attend(run, r, query, keys[:n], values[:n], seen[:, :n], sinks, position, first_key)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
