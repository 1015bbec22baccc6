"""A request without a prefix ends early: its drafted slots are not written."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Lists):
    def prefix(self, length):
        self.empty = length == 0
        return length

    def drafted(self, count):
        return 0 if self.empty else count


generate_draft_decode_kv_indices = lists_of(Wrong())
