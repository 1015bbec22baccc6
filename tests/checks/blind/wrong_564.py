"""Wrong: a row without keys gets the sink as its LSE as it is, in base e."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        if sinks is not None:
            lse = torch.where(partial[2] > 0, lse, sinks)
        return out, lse


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
