"""The template for mask and sinks together was instantiated without a window: with all three the window is not applied."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.shown is not None and run.sinks is not None:
            run.window = -1


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
