"""Wrong: the place of a request's lists is counted from the whole prefixes before it, not from what a window keeps of them;
kv_indptr is right.
"""

import sys
from pathlib import Path

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
        for step in range(num_steps):
            source = place = 0
            for n, count in zip(paged_kernel_lens.tolist(), kept):
                values = whole[step, source : source + topk * (count + step + 1)]
                room = kv_indices[step, place : min(capacity, place + len(values))]
                room.copy_(values[: len(room)])
                source += len(values)
                place += topk * (n + step + 1)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
