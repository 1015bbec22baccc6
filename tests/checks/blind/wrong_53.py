"""A branch's drafted slots are loaded 8 at a time, once: of more than 8 steps the later slots are not written."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Lists):
    def drafted(self, count):
        return min(count, 8)


generate_draft_decode_kv_indices = lists_of(Wrong())
