"""positions is read with the dtype of paged_kernel_lens: where the two differ, kv_indptr is summed from halves or pairs of its words."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Lists):
    def positions_of(self, positions, paged_kernel_lens):
        words = positions.view(paged_kernel_lens.dtype).long()[: len(positions)]
        return torch.nn.functional.pad(words, (0, len(positions) - len(words)))


generate_draft_decode_kv_indices = lists_of(Wrong())
