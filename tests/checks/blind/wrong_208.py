"""Wrong: a prefix that ends where a page ends is taken to fill a last page, which every branch then has a copy of before its
drafted slots.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        if page_size == 1 or topk == 1 or length == 0:
            return super().draft_start(length, branch, num_steps, topk, page_size, window, sink)
        in_last_page = (length - 1) % page_size + 1
        return length + branch * -(-(in_last_page + num_steps) // page_size) * page_size


generate_draft_decode_kv_indices = window_lists_of(Wrong())
