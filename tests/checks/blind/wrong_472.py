"""The sinks, a layer's weights, are turned into log2 units once for a buffer, and not again when new weights are loaded into it."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.weights = Memory()

    def start(self, run):
        super().start(run)
        if run.sinks is not None:
            log2_sinks = self.weights.of(run.call.sinks, lambda: run.call.sinks.double() / math.log(2.0))
            run.sinks = (log2_sinks * math.log(2.0)).to(run.dtype)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
