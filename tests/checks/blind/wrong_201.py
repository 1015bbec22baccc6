"""Wrong: tokens of a prefix's last, partly filled page are listed from each branch's own copy of that page."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        start = super().draft_start(length, branch, num_steps, topk, page_size, window, sink)
        has_copies = page_size > 1 and topk > 1
        self.full, self.shift = (length // page_size * page_size, start - length) if has_copies else (length, 0)
        return start

    def kept(self, length, window, sink):
        at = super().kept(length, window, sink)
        return torch.where(at < self.full, at, at + self.shift)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
