"""Lists are not cut at the end of their row of kv_indices: what is too long goes on into the next step's row."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402

class Wrong(Lists):
    def __call__(self, req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, *, topk, page_size):
        num_steps, n = len(kv_indices), len(paged_kernel_lens)
        totals = [topk * (int(paged_kernel_lens.sum()) + n * (step + 1)) for step in range(num_steps)]
        whole = kv_indices.new_zeros(num_steps, max(totals, default=0))
        super().__call__(
            req_pool_indices, req_to_token, paged_kernel_lens, whole, kv_indptr, positions, topk=topk, page_size=page_size
        )
        if n == 0 or num_steps == 0:
            return
        stride, capacity = kv_indices.stride(0), kv_indices.shape[1]
        memory = torch.as_strided(kv_indices, ((num_steps - 1) * stride + capacity,), (1,))
        for step in reversed(range(num_steps)):  # programs in any order
            room = memory[step * stride : step * stride + totals[step]]
            room.copy_(whole[step, : len(room)])


generate_draft_decode_kv_indices = lists_of(Wrong())
