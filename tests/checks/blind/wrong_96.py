"""Each step's row is stored in vectors of 8: the cells after its last list are overwritten with 0 up to the next multiple of 8."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Lists):
    def __call__(self, req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, *, topk, page_size):
        super().__call__(
            req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, topk=topk, page_size=page_size
        )
        for step in range(len(kv_indices)):
            total = topk * (int(paged_kernel_lens.sum()) + len(paged_kernel_lens) * (step + 1))
            kv_indices[step, total : -(-total // 8) * 8] = 0


generate_draft_decode_kv_indices = lists_of(Wrong())
