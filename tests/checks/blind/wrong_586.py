"""Wrong: a prefix longer than its window keeps the sink's tokens and the window's one after the other, also where they overlap."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(WindowLists):
    def kept(self, length, window, sink):
        if not window or length <= window:
            return super().kept(length, window, sink)
        return torch.cat((torch.arange(min(sink, length)), torch.arange(length - window, length)))


generate_draft_decode_kv_indices = window_lists_of(Wrong())
