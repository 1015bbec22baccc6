"""The sink is added by a request's last split of 512 keys, which rows that see none of its keys skip: they lose their sink."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


SPLIT = 512


class Wrong(Kernel):
    def sink_rows(self, run, r, position):
        sinks = super().sink_rows(run, r, position)
        if sinks is None or not run.causal or run.lens[r] <= SPLIT:
            return sinks
        last = (run.lens[r] - 1) // SPLIT * SPLIT
        return sinks.masked_fill((position < last).unsqueeze(1), -math.inf)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
