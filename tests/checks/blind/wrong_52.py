"""kv_indptr's rows are taken to be num_requests * topk + 1 apart: a wider buffer gets the later steps at the wrong places."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Lists):
    def boundaries(self, kv_indptr, positions, num_steps):
        packed = torch.as_strided(kv_indptr, (num_steps, len(positions) + 1), (len(positions) + 1, 1))
        super().boundaries(packed, positions, num_steps)


generate_draft_decode_kv_indices = lists_of(Wrong())
