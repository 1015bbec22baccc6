"""The variant for batches over 128 takes K/V head h % num_kv_heads for query head h, not h // group."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.batch > 128 and run.group > 1 and run.num_kv_heads > 1:
            run.head_map = torch.arange(run.p.num_qo_heads) % run.num_kv_heads


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
