"""The window is on if window_left > 0: with 0, the row's own key alone, every key is seen."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.window == 0:
            run.window = -1


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
