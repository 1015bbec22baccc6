"""Wrong: the sink and the window of a prefix are copied one after the other, so that tokens of both are in the list
twice.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def kept(self, length, window, sink):
        if not window:
            return super().kept(length, window, sink)
        return torch.cat((torch.arange(min(length, sink)), torch.arange(max(0, length - window), length)))


generate_draft_decode_kv_indices = window_lists_of(Wrong())
