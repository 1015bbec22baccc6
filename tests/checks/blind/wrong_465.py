"""Where the table has pages, the tokens of a window are read from the start of the page that the window begins in."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(WindowLists):
    def __call__(self, *args, entry_page_size=1, **more):
        self.entry = entry_page_size
        super().__call__(*args, entry_page_size=entry_page_size, **more)

    def kept(self, length, window, sink):
        start = max(length - window, sink)
        if not window or self.entry == 1 or start >= length or length <= window + sink:
            return super().kept(length, window, sink)
        return torch.cat((torch.arange(sink), start // self.entry * self.entry + torch.arange(length - start)))


generate_draft_decode_kv_indices = window_lists_of(Wrong())
