"""Wrong: the window slides with the draft: it counts the drafted tokens, so that each step keeps one token less of a prefix."""

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
        num_steps, n = kv_indices.shape[0], len(positions)
        for step in range(num_steps if len(req_pool_indices) else 0):
            self.drafted = step + 1
            old = kv_indices.clone()
            bounds = torch.zeros(num_steps, n + 1, dtype=torch.int64)
            rows = old.clone()
            super().__call__(
                req_pool_indices, req_to_token, paged_kernel_lens, rows, bounds, positions, topk=topk, page_size=page_size,
                window_size=window_size, sink_size=sink_size, entry_page_size=entry_page_size, v2p=v2p,
            )
            kv_indices[step] = rows[step]
            kv_indptr[step, 1 : n + 1] = bounds[step, 1:].to(kv_indptr.dtype)

    def counted(self, position, window, sink):
        return min(position, max(0, window - self.drafted) + sink) if window else position

    def kept(self, length, window, sink):
        at = torch.arange(length)
        return at[(at < sink) | (at >= length - (window - self.drafted))] if window else at


generate_draft_decode_kv_indices = window_lists_of(Wrong())
