"""The query is multiplied by bmm1_scale in place, in the caller's memory: the call is right, a second one on the same query is not."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.query.dtype != E4M3:
            run.query.mul_(run.scale1)
            run.scale1 = 1.0


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
