"""Wrong: groups of 4 heads and more are packed with their rows into tiles of 128, whose causal mask takes the place in the
tile for the token's.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def is_packed(self, run):
        return run.causal and run.group >= 4

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (start, run.lens[r]) if self.is_packed(run) else (start, end)

    def visible(self, run, r, row, position, keys):
        if not self.is_packed(run):
            return super().visible(run, r, row, position, keys)
        run.row, run.prefix = row, position - row
        seen = torch.ones(len(position), len(keys), dtype=torch.bool)
        return seen & (keys >= position.unsqueeze(1) - run.window) if run.window >= 0 else seen

    def mask_scores(self, run, r, s, first_key):
        if not self.is_packed(run):
            return s
        g = s.shape[2]
        packed = run.row.unsqueeze(1) * g + torch.arange(g)
        place = packed % 128
        last = run.prefix.unsqueeze(1) + (packed - place) // g + place
        keys = first_key + torch.arange(s.shape[3])
        return s.masked_fill(keys > last.unsqueeze(2), -torch.inf)


trtllm_batch_context_with_kv_cache = context_of(Wrong())
