"""Wrong: a branch after the first begins at the start of its pages, not after its copy of the prefix's last tokens."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        start = super().draft_start(length, branch, num_steps, topk, page_size, window, sink)
        return start if branch == 0 or page_size == 1 or topk == 1 else start - length % page_size


generate_draft_decode_kv_indices = window_lists_of(Wrong())
