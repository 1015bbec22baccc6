"""With bmm1_scale_log2 the sinks are taken to be in base 2 already, as the logits are."""

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
