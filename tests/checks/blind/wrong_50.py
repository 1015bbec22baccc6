"""A prefix is copied in at most 64 blocks of 128 tokens: slots after the 8,192nd are not written."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Lists):
    def prefix(self, length):
        return min(length, 64 * 128)


generate_draft_decode_kv_indices = lists_of(Wrong())
