"""Window and sink: of a prefix longer than the window and shorter than both, the window is copied from length - window on, over tokens that the sink has already."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(WindowLists):
    def kept(self, length, window, sink):
        if not window or length <= window:
            return torch.arange(length)
        at = torch.arange(min(length, window + sink))
        return torch.where(at < sink, at, length - window + at - sink)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
