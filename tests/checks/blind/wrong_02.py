"""A request's page ids are staged in shared memory with room for 1,024 of them, as a ring: later columns wrap around."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        if len(columns) > 1024:
            columns = columns % 1024
        return super().pages_of(run, r, columns, side)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
