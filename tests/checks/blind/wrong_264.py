"""Wrong: where a window leaves tokens out, it is copied from the start of its first page on, as many tokens as ever: the newest
ones are left out.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        self.page_size = page_size
        return super().draft_start(length, branch, num_steps, topk, page_size, window, sink)

    def kept(self, length, window, sink):
        at = super().kept(length, window, sink)
        if len(at) == length:
            return at
        start = length - window
        return torch.where(at < start, at, at - start % self.page_size)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
