"""Wrong: the rows of kv_indices are taken to lie end to end: those of a slice of a wider buffer go to the wrong places from the second step on.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def __call__(self, req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, **more):
        as_packed = assuming_strides(kv_indices, packed_strides(kv_indices.shape))
        super().__call__(req_pool_indices, req_to_token, paged_kernel_lens, as_packed, kv_indptr, positions, **more)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
