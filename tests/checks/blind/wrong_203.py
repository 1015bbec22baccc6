"""Wrong: a window bounds the positions in place, in the caller's tensor where .to(torch.int64) copies nothing."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def __call__(
        self, req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, *, topk, page_size,
        window_size=0, sink_size=0, entry_page_size=1, v2p=None, schedule=None,
    ):
        bounds = positions.to(torch.int64)
        if window_size:
            bounds.clamp_(max=window_size + sink_size)
        super().__call__(
            req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, bounds, topk=topk, page_size=page_size,
            window_size=window_size, sink_size=sink_size, entry_page_size=entry_page_size, v2p=v2p,
        )


generate_draft_decode_kv_indices = window_lists_of(Wrong())
