"""Wrong: where entries are virtual pages, the first drafted token's place is looked up, and the others are taken to follow it."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(WindowLists):
    def drafted_slots(self, entries, start, count, entry_page_size):
        self.count, self.entry = count, entry_page_size
        return super().drafted_slots(entries, start, count, entry_page_size)

    def physical(self, slots, v2p, page_size):
        placed = super().physical(slots, v2p, page_size)
        if self.entry > 1:
            placed[-self.count :] = placed[-self.count] + torch.arange(self.count)
        return placed


generate_draft_decode_kv_indices = window_lists_of(Wrong())
