"""The prefixes before a request are summed within its block of 256 requests only."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Lists):
    def before(self, lens):
        return torch.cat([block.cumsum(0) - block for block in lens.split(256)])


generate_draft_decode_kv_indices = lists_of(Wrong())
