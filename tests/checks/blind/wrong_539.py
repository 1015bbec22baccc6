"""Sinks are multiplied by log2(e) where the host folds it into the scale; with bmm1_scale_log2 they stay as they are in the base-2 softmax."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.sinks is not None and run.call.bmm1_scale_log2 is not None:
            run.sinks = run.sinks * math.log(2.0)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
