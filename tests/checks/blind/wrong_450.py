"""causal=False: rows before a request's first key (more rows than keys) are skipped as a causal kernel may, and come out as rows without keys."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return seen if run.causal else seen & (position >= 0).unsqueeze(1)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
