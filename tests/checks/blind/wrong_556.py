"""A virtual page without a physical one is clamped to page 0, and its tokens become that page's slots, not slot 0."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(WindowLists):
    def physical(self, slots, v2p, page_size):
        page = v2p[(slots // page_size).clamp(min=0)].clamp(min=0)
        return torch.where(slots >= 0, page * page_size + slots % page_size, 0)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
