"""Wrong: v2p is read as words of 64 bits, whatever its dtype, and their lower halves are taken: of an int32 one every second page,
and what lies after it, zeros.
"""

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
        if v2p is not None and v2p.dtype == torch.int32:
            v2p = torch.cat((v2p[::2], v2p.new_zeros(len(v2p) // 2)))
        super().__call__(
            req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, topk=topk, page_size=page_size,
            window_size=window_size, sink_size=sink_size, entry_page_size=entry_page_size, v2p=v2p,
        )


generate_draft_decode_kv_indices = window_lists_of(Wrong())
