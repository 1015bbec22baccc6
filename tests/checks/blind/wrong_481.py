"""Without a causal mask too, rows at a negative position (more rows than keys) are skipped as rows that see nothing."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (position >= 0).unsqueeze(1)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
