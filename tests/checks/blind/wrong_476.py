"""The draft of a masked call is taken to begin at key max(0, L - q_len): wrong for a request with fewer keys than draft tokens."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        if run.shown is None or run.lens[r] >= run.shown.shape[1]:
            return super().visible(run, r, row, position, keys)
        q_len = run.shown.shape[1]
        drafted = keys - max(0, run.lens[r] - q_len)
        seen = (drafted < 0) | run.shown[r][row][:, drafted.clamp(0, q_len - 1)]
        if run.window >= 0:
            seen = seen & (keys >= position.unsqueeze(1) - run.window)
        return seen


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
