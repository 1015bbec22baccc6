"""A branch is given one page, or two where its drafts pass the end of the first: drafts that need a third share it with the next branch."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Lists):
    def pages_per_branch(self, in_last_page, num_steps, page_size):
        return 1 if in_last_page + num_steps <= page_size else 2


generate_draft_decode_kv_indices = lists_of(Wrong())
