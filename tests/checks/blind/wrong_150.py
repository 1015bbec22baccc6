"""Wrong: a token of a virtual page without a page is put on page 0 at its own place in the page, not at slot 0."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def physical(self, slots, v2p, page_size):
        page = v2p[(slots // page_size).clamp(min=0)]
        return page.clamp(min=0) * page_size + slots % page_size


generate_draft_decode_kv_indices = window_lists_of(Wrong())
