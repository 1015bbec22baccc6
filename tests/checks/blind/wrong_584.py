"""Wrong: a tile's request is packed into 8 bits for the loads of K and V: request 256 and later read those of request r - 256."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.lens = [run.lens[r % 256] for r in range(run.batch)]
        run.kv_offsets = [run.kv_offsets[r % 256] for r in range(run.batch)]


trtllm_ragged_attention_deepseek = ragged_of(Wrong())
