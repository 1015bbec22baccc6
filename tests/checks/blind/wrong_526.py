"""A prefix longer than the window but not than sink and window together: the sink's tokens and the window's are listed although they overlap, and cut to the count."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(WindowLists):
    def kept(self, length, window, sink):
        if window and window < length < window + sink:
            return torch.cat((torch.arange(sink), torch.arange(length - window, length)))[:length]
        return super().kept(length, window, sink)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
