"""A given lse is written as if its rows lay end to end: of a strided one the values go to the wrong places."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.lse is not None:
            run.lse = assuming_strides(run.lse, packed_strides(run.lse.shape))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
