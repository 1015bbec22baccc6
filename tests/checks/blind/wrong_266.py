"""Wrong: the prefix of each step after the first is copied from the first step's list, whose slots are translated, and is
translated again.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def drafted_slots(self, entries, start, count, entry_page_size):
        self.count = count
        return super().drafted_slots(entries, start, count, entry_page_size)

    def physical(self, slots, v2p, page_size):
        found = super().physical(slots, v2p, page_size)
        if self.count == 1:
            return found
        prefix = found[: -self.count]
        again = super().physical(prefix.clamp(max=len(v2p) * page_size - 1), v2p, page_size)
        return torch.cat((again, found[-self.count :]))


generate_draft_decode_kv_indices = window_lists_of(Wrong())
