"""Wrong: where entries are pages, the position of a token, not its column, is held against the columns of req_to_token: what
lies at or after as many tokens as there are columns counts as zero.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def slots(self, entries, at, entry_page_size):
        return torch.where(at < len(entries), super().slots(entries, at, entry_page_size), 0)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
