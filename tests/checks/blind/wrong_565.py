"""Wrong: bmm1_scale_log2 is used only where bmm1_scale was left at its default."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def start(self, run):
        super().start(run)
        if run.call.bmm1_scale_log2 is not None and float(run.call.bmm1_scale) != 1.0:
            run.scale1 = float(run.call.bmm1_scale)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
