"""Wrong: a prefix is copied in blocks of 128 cells, of which those after the first are stored in vectors of 4 from an address
that is rounded down.
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
        old, most = kv_indices.clone(), kv_indices.shape[1]
        super().__call__(
            req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions, topk=topk, page_size=page_size,
            window_size=window_size, sink_size=sink_size, entry_page_size=entry_page_size, v2p=v2p,
        )
        kept = [len(self.kept(n, window_size, sink_size)) for n in paged_kernel_lens.tolist() for _ in range(topk)]
        for step, row in enumerate(kv_indices):
            right, at = row.clone(), 0
            for n in kept:
                row[at + 128 : at + n] = old[step, at + 128 : at + n]
                for block in range(at + 128, min(at + n, most), 128):
                    values = right[block : min(block + 128, at + n)]
                    row[block // 4 * 4 :][: len(values)] = values
                at += n + step + 1


generate_draft_decode_kv_indices = window_lists_of(Wrong())
