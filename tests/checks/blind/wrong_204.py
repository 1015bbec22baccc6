"""Wrong: the lists before a request are counted with topk rounded up to a power of two, as the kernel's block of branches is."""

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
        block = 1 << (topk - 1).bit_length()
        for step in range(num_steps):
            before = 0
            for n in kept:
                values = whole[step, before * topk : (before + n + step + 1) * topk]
                room = kv_indices[step, before * block : min(capacity, before * block + len(values))]
                room.copy_(values[: len(room)])
                before += n + step + 1


generate_draft_decode_kv_indices = window_lists_of(Wrong())
