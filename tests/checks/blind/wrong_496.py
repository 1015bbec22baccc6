"""Where the prefix is longer than the window, entries after the sink come from its last window_size tokens by their place: wrong if sink and window overlap."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(WindowLists):
    def kept(self, length, window, sink):
        at = torch.arange(self.counted(length, window, sink))
        if window and length > window:
            at = torch.where(at < sink, at, length - window + at - sink)
        return at


generate_draft_decode_kv_indices = window_lists_of(Wrong())
