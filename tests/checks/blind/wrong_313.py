"""Wrong: the pages of a branch are counted from the last page of the batch's first prefix, for all requests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def __call__(
        self, req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, *, topk, page_size,
        window_size=0, sink_size=0, entry_page_size=1, v2p=None, schedule=None,
    ):
        self.first = int(paged_kernel_lens[0]) if len(paged_kernel_lens) else 0
        super().__call__(
            req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, topk=topk, page_size=page_size,
            window_size=window_size, sink_size=sink_size, entry_page_size=entry_page_size, v2p=v2p,
        )

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        if page_size == 1 or topk == 1:
            return super().draft_start(length, branch, num_steps, topk, page_size, window, sink)
        return length + branch * -(-(self.first % page_size + num_steps) // page_size) * page_size


generate_draft_decode_kv_indices = window_lists_of(Wrong())
