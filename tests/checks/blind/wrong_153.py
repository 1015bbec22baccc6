"""Wrong: kv_indptr bounds the positions by the window and leaves the sink out."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def counted(self, position, window, sink):
        return super().counted(position, window, 0)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
