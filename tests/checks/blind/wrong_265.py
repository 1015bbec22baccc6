"""Wrong: the pages of a branch are counted up to the step of the list, not for all steps of the draft."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        self.has_pages = page_size > 1 and topk > 1
        self.start_after = lambda steps: super(Wrong, self).draft_start(length, branch, steps, topk, page_size, window, sink)
        return self.start_after(num_steps)

    def drafted_slots(self, entries, start, count, entry_page_size):
        start = self.start_after(count) if self.has_pages else start
        return super().drafted_slots(entries, start, count, entry_page_size)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
