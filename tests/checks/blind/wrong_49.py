"""A branch's pages are counted from num_steps alone: where the prefix's last page and the draft together fill one page more, branches overlap."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Lists):
    def pages_per_branch(self, in_last_page, num_steps, page_size):
        return -(-num_steps // page_size)


generate_draft_decode_kv_indices = lists_of(Wrong())
