"""The K/V head of a query head is h >> log2(group), rounded up: groups that are no power of two read other heads."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.group & (run.group - 1):
            shift = (run.group - 1).bit_length()
            run.head_map = torch.arange(run.p.num_qo_heads) >> shift


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
