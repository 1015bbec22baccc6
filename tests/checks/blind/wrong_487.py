"""Page ids are staged in shared memory as 16 bits: pages from 65,536 on are read as others."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side) & 0xFFFF


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
