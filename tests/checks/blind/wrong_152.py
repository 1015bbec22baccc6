"""Wrong: a branch's drafted slots are looked for after as many tokens as the list keeps of the prefix."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        length = self.counted(length, window, sink)
        return super().draft_start(length, branch, num_steps, topk, page_size, window, sink)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
