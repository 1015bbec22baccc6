"""Wrong: the page of a virtual slot is found by a division that rounds towards zero: a slot just below 0 lies in page 0."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def physical(self, slots, v2p, page_size):
        virtual = torch.div(slots, page_size, rounding_mode="trunc")
        page = v2p[virtual.clamp(min=0)]
        return torch.where((virtual >= 0) & (page >= 0), page * page_size + (slots - virtual * page_size), 0)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
