"""Wrong: of virtual slots those that a window keeps and those of drafted tokens are translated, those of the sink before the window are stored as they
are.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def kept(self, length, window, sink):
        self.untranslated = min(sink, length - window) if window and length > window else 0
        return super().kept(length, window, sink)

    def physical(self, slots, v2p, page_size):
        right = super().physical(slots, v2p, page_size)
        return torch.cat((slots[: self.untranslated], right[self.untranslated :]))


generate_draft_decode_kv_indices = window_lists_of(Wrong())
