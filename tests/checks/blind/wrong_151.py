"""Wrong: where entries are pages, the drafted slots of a branch follow its first one, also beyond the end of its page."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def drafted_slots(self, entries, start, count, entry_page_size):
        first = super().drafted_slots(entries, start, 1, entry_page_size)
        if entry_page_size == 1:
            return super().drafted_slots(entries, start, count, entry_page_size)
        return first + torch.arange(count)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
