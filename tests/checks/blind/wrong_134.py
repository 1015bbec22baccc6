"""Wrong: rows and heads lie in tiles of 64; above 64 heads the number of a tile is taken for that of its row."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def visible(self, run, r, row, position, keys):
        run.row, run.keys = row, keys
        seen = super().visible(run, r, row, position, keys)
        return torch.ones_like(seen) if run.p.num_qo_heads > 64 else seen

    def mask_scores(self, run, r, s, first_key):
        heads, width = run.p.num_qo_heads, run.offsets[r + 1] - run.offsets[r]
        if heads <= 64:
            return s
        token = ((run.row.unsqueeze(1) * heads + torch.arange(heads)) // 64).clamp(max=width - 1)
        position = run.lens[r] - width + token
        return s.masked_fill(run.keys > position.unsqueeze(2), -math.inf)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
