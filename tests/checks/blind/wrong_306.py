"""Wrong: a tile of 128 keys is multiplied whole, with weights of zero after the request's end, pages that dead cells of the table
name (cut to the pool) included; the rest of the last page is zeroed in shared memory.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        ps, length = run.page_size, run.lens[r]
        first, last = -(-length // ps), -(-length // 128) * 128 // ps
        columns = torch.arange(first, max(first, min(last, run.k_table.shape[1])))
        pages = self.pages_of(run, r, columns, "v").clamp(0, len(run.v_cache) - 1)
        dead = self.entries(run, "v", pages, slice(None))
        return out + (dead * 0.0).sum(0), lse


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
