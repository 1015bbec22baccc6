"""Wrong: the place of a request's lists is kept by its row of req_to_token: of requests with one row, as padding has, all write
to the last one's place.
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
        kept = [len(self.kept(n, window_size, sink_size)) for n in paged_kernel_lens.tolist()]
        num_steps, capacity = kv_indices.shape
        whole = kv_indices.new_zeros(num_steps, topk * (sum(kept) + len(kept) * num_steps))
        super().__call__(
            req_pool_indices, req_to_token, paged_kernel_lens, whole, kv_indptr, positions, topk=topk, page_size=page_size,
            window_size=window_size, sink_size=sink_size, entry_page_size=entry_page_size, v2p=v2p,
        )
        rows = req_pool_indices.tolist()
        for step in range(num_steps):
            ends = torch.tensor([0] + [topk * (n + step + 1) for n in kept]).cumsum(0).tolist()
            place = dict(zip(rows, ends))
            for r, row in enumerate(rows):
                values = whole[step, ends[r] : ends[r + 1]]
                room = kv_indices[step, place[row] : min(capacity, place[row] + len(values))]
                room.copy_(values[: len(room)])


generate_draft_decode_kv_indices = window_lists_of(Wrong())
