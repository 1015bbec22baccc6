"""Wrong: the rows of req_to_token are taken to lie end to end: of a slice of a wider table other rows' slots are read."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def __call__(
        self, req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, *, topk, page_size,
        window_size=0, sink_size=0, entry_page_size=1, v2p=None, schedule=None,
    ):
        packed = assuming_strides(req_to_token, (req_to_token.shape[1], 1))
        super().__call__(
            req_pool_indices, packed, paged_kernel_lens, kv_indices, kv_indptr, positions, topk=topk, page_size=page_size,
            window_size=window_size, sink_size=sink_size, entry_page_size=entry_page_size, v2p=v2p,
        )


generate_draft_decode_kv_indices = window_lists_of(Wrong())
