"""Wrong: a branch's pages begin after the prefix's last page, as if the first branch too had a copy of that page; it goes on
in the page itself.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        start = super().draft_start(length, branch, num_steps, topk, page_size, window, sink)
        partly = topk > 1 and page_size > 1 and length % page_size
        return start + page_size if partly else start


generate_draft_decode_kv_indices = window_lists_of(Wrong())
