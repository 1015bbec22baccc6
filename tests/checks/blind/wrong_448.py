"""The draft mask is unpacked once per buffer: what a later step of the draft writes there is not looked at."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.unpacked = Memory()

    def unpack(self, run, mask):
        return self.unpacked.of(mask, lambda: super(Wrong, self).unpack(run, mask))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
