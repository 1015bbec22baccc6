"""A prefix longer than its window and shorter than window and sink together: the window's tokens are written after the whole sink, from the window's start."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(WindowLists):
    def kept(self, length, window, sink):
        if not window or not window < length < window + sink:
            return super().kept(length, window, sink)
        at = torch.arange(length)
        return torch.where(at < sink, at, length - window + at - sink)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
