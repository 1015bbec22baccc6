"""The query's rows are taken to lie end to end: a strided query (a part of a fused QKV) is read from the wrong places."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        run.query = assuming_strides(run.query, packed_strides(run.query.shape))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
