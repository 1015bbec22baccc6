"""With pages as entries the drafted slots follow the first one's: a draft that crosses into its next page does not look that page up."""

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
