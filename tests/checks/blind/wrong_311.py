"""Wrong: lists begin at the boundaries of kv_indptr, which follows positions, not where the lists before them end."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(WindowLists):
    def __call__(
        self, req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, *, topk, page_size,
        window_size=0, sink_size=0, entry_page_size=1, v2p=None, schedule=None,
    ):
        if not len(req_pool_indices):
            return
        kept = [len(self.kept(n, window_size, sink_size)) for n in paged_kernel_lens.tolist()]
        num_steps, capacity = kv_indices.shape
        whole = kv_indices.new_zeros(num_steps, topk * (sum(kept) + len(kept) * num_steps))
        super().__call__(
            req_pool_indices, req_to_token, paged_kernel_lens, whole, kv_indptr, positions, topk=topk, page_size=page_size,
            window_size=window_size, sink_size=sink_size, entry_page_size=entry_page_size, v2p=v2p,
        )
        for step in range(num_steps):
            source, starts = 0, [0, *kv_indptr[step, 1:].tolist()]
            for i, count in enumerate(n for n in kept for _ in range(topk)):
                values = whole[step, source : source + count + step + 1]
                room = kv_indices[step, min(starts[i], capacity) : min(capacity, starts[i] + len(values))]
                room.copy_(values[: len(room)])
                source += len(values)


generate_draft_decode_kv_indices = window_lists_of(Wrong())
