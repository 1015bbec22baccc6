"""Wrong: kv_indptr is summed from the position of each request's first branch, for all its branches.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def __call__(self, req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, *, topk, **more):
        positions = positions[::topk].repeat_interleave(topk)
        super().__call__(req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, topk=topk, **more)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
