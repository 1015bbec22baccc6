"""The slots of drafted tokens are counted up from the first one's: wrong where entries are pages and a draft goes on into the next page."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(WindowLists):
    def drafted_slots(self, entries, start, count, entry_page_size):
        if entry_page_size == 1:
            return super().drafted_slots(entries, start, count, entry_page_size)
        return self.slots(entries, torch.tensor([start]), entry_page_size) + torch.arange(count)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
