"""Wrong: a plan is kept by the shapes of query and batch and by max_seq_len, but not by the page size that it was made
for.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    plans = {}

    def start(self, run):
        super().start(run)
        key = (tuple(run.query.shape), run.query.dtype, run.batch, run.num_kv_heads, run.p.max_kv_len)
        run.page_size = self.plans.setdefault(key, run.page_size)

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns.clamp(max=run.k_table.shape[1] - 1), side)

    def entries(self, run, side, pages, cut):
        real = run.p.page_size
        tokens = super().entries(run, side, pages, slice(None)).unflatten(0, (len(pages), real))
        return tokens[:, torch.arange(run.page_size) % real].flatten(0, 1)[cut]


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
