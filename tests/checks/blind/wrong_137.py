"""Wrong: all requests have as many parts of 512 keys as the longest; an empty part hands the merge an LSE of 0."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        empty = -(-max(run.lens) // 512) - -(-run.lens[r] // 512)
        nothing = torch.zeros_like(acc), torch.zeros_like(largest), torch.full_like(total, empty)
        return self.merge([(acc, largest, total), nothing]) if empty else (acc, largest, total)


trtllm_batch_decode_with_kv_cache_mla = mla_of(Wrong())
