"""Wrong: slots are gathered by a product with a matrix of zeros and ones in float32, which holds whole numbers up to 2**24."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def slots(self, entries, at, entry_page_size):
        return super().slots(entries, at, entry_page_size).float().long()

    def physical(self, slots, v2p, page_size):
        return super().physical(slots.clamp(max=len(v2p) * page_size - 1), v2p, page_size)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
