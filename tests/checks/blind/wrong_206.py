"""Wrong: of virtual slots those of the prefix are translated, those of drafted tokens are stored as they are."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def drafted_slots(self, entries, start, count, entry_page_size):
        self.count = count
        return super().drafted_slots(entries, start, count, entry_page_size)

    def physical(self, slots, v2p, page_size):
        found = super().physical(slots, v2p, page_size)
        found[-self.count :] = slots[-self.count :]
        return found


generate_draft_decode_kv_indices = window_lists_of(Wrong())
