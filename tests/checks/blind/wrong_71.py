"""The draft mask is applied on top of the causal one: a bit that shows a later draft token to a row is ignored."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return seen if run.shown is None else seen & (keys <= position.unsqueeze(1))


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
